"""Draws the messages of both sides in order of time: the legacy server left, the modern client right.

The gateway stands between the two and logs every message (`debug.bodies`), so its log is all that is read.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

WIDEST = 100
NARROWEST = 80
DETAIL_LINES = 3

Side = Literal["old", "new"]
BOLD, DIM, YELLOW, CYAN, PLAIN = "\033[1m", "\033[2m", "\033[33m", "\033[36m", "\033[0m"
_ESCAPE: Final = re.compile(r"\033\[\d+m")
_DIRECTIONS: Final[Mapping[str, tuple[Side, bool]]] = {
    "from_client": ("new", True),
    "to_client": ("new", False),
    "to_upstream": ("old", True),
    "from_upstream": ("old", False),
}


class Row(NamedTuple):
    """One message: a title and the interesting part of its content."""

    side: Side
    to_server: bool
    title: str
    details: Sequence[str] = ()


def rows(log: str) -> list[Row]:
    """Describe the messages in a gateway's log; a response is named after the latest request with its id."""
    asked: dict[tuple[Side, bool, str], str] = {}
    found = []
    for line in log.splitlines():
        try:
            event = json.loads(line)
            if event["event"] != "debug.body":
                continue
            (side, to_server), body = _DIRECTIONS[event["direction"]], _mapping(json.loads(event["text"]))
        except (ValueError, KeyError, TypeError):
            continue  # it is no message, or the log has cut it short
        is_request = "method" in body
        # A response goes against its request, and the requests of both directions may share an id.
        key = (side, to_server == is_request, str(body.get("id")))
        if is_request:
            asked[key] = str(body["method"])
        title, details = _request(body) if is_request else _reply(body, asked.get(key, ""))
        found.append(Row(side, to_server, title, [detail for detail in details if detail]))
    return found


def draw(told: Iterable[Row], *, width: int, color: bool) -> list[str]:
    """Return lines with a column for each side, for a terminal of this width."""
    width = min(max(width, NARROWEST), WIDEST)
    left = (width - 5) // 2
    right = width - 5 - left
    lines = [
        _paint(BOLD, f"{'LEGACY SERVER (2025-11-25)':<{left - 2}}gateway{'MODERN CLIENT (2026-07-28)':>{right}}"),
        f"{'─' * (left + 2)}┼{'─' * (right + 2)}",
    ]
    for row in told:
        old = row.side == "old"
        arrow = _paint(YELLOW if old else CYAN, "◀" if row.to_server else "▶")
        room = left if old else right
        cell = textwrap.wrap(row.title, room, max_lines=2, placeholder="…")
        for detail in row.details:
            cell += textwrap.wrap(
                detail, room, initial_indent="  ", subsequent_indent="  ", max_lines=DETAIL_LINES, placeholder="…"
            )
        for number, line in enumerate(cell):
            mark = " " if number else arrow
            text = _paint(DIM if number else BOLD, line)
            pad = " " * (left - len(line))
            lines.append(f"{text}{pad} {mark}│" if old else f"{' ' * (left + 2)}│{mark} {text}")
    return lines if color else [_ESCAPE.sub("", line) for line in lines]


def _request(body: dict[str, Any]) -> tuple[str, list[str]]:
    method, params = str(body["method"]), _mapping(body.get("params"))
    match method:
        case "initialize":
            return f"initialize {params.get('protocolVersion', '')}", []
        case "tools/call":
            answers = _mapping(params.get("inputResponses"))
            again = "inputResponses" in params or "requestState" in params
            return f"tools/call {params.get('name', '')}" + (", again" if again else ""), [
                "" if again else json.dumps(params.get("arguments", {}), ensure_ascii=False),
                *(f"inputResponses {key}: {_answer(_mapping(value))}" for key, value in answers.items()),
                "requestState" if "requestState" in params else "",
            ]
        case "elicitation/create":
            return "elicitation/create, nested in the call", [f'"{params.get("message", "")}"']
        case _:
            return method, []


def _reply(body: dict[str, Any], method: str) -> tuple[str, list[str]]:
    if error := _mapping(body.get("error")):
        return f"error {error.get('code')}", [str(error.get("message", ""))]
    result = _mapping(body.get("result"))
    if result.get("resultType") == "input_required":
        asks = _mapping(result.get("inputRequests")).items()
        questions = [f'{key}: "{_mapping(_mapping(ask).get("params")).get("message", "")}"' for key, ask in asks]
        return "input_required", [*questions, "requestState" if "requestState" in result else ""]
    if method == "elicitation/create" or "action" in result:
        return "the answer, in a separate POST", [_answer(result)]
    title = str(result.get("resultType", "result"))
    if method == "tools/call":
        blocks = map(_mapping, result.get("content") or [])
        return title, [" ".join(str(block.get("text", block.get("type"))) for block in blocks)]
    return f"{method}: {title}" if method else title, []


def _answer(value: dict[str, Any]) -> str:
    content = ", ".join(f"{name} = {given}" for name, given in _mapping(value.get("content")).items())
    return f"{value.get('action', '')} {content}".strip()


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _paint(code: str, text: str) -> str:
    return f"{code}{text}{PLAIN}"
