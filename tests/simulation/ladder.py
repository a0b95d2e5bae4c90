"""Tells a history as a ladder of messages, in order of time."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.simulation.history import History, Outcome

_METHOD: Final = re.compile(rb'"method": ?"([a-z_A-Z/]+)"')
_TAG: Final = re.compile(rb'"tag\\*": ?\\*"(c\d+)')
_QUESTION: Final = re.compile(rb"(c\d+/\d+(?:=\d+)?)")
_REQUEST: Final = re.compile(rb"([A-Z]+) (\S+) HTTP/1.1")
_HTTP: Final = re.compile(rb"HTTP/1.1 (\d+)")
_REASON: Final = re.compile(rb'"reason": ?"(\w+)"')


def watch(history: "History") -> list[tuple[float, str]]:
    """The story of a history, to which its messages are added as they arrive."""
    story: list[tuple[float, str]] = []

    def seen(connection: Any, is_to_server: bool, data: bytes) -> None:  # noqa: FBT001
        one, other = connection.ends if is_to_server else connection.ends[::-1]
        what = "  ".join(_words(data, is_to_server=is_to_server))
        if what:
            line = f"{one.process.name:>8} → {other.process.name:<8} #{connection.number:<4} {what}"
            story.append((history.now, line))

    history.network.watchers.append(seen)
    return story


def _words(data: bytes, *, is_to_server: bool) -> Iterator[str]:
    head = data.split(b"\r\n", 1)[0]
    if is_to_server and (asked := _REQUEST.fullmatch(head)) is not None:  # what was split begins anywhere
        verb, path = asked[1].decode(), asked[2].decode()
        yield verb if path == "/mcp" else f"{verb} {path}"
        if (last := re.search(rb"(?i)last-event-id: (\S+)", data)) is not None:
            yield f"from {last[1].decode()}"
    elif (status := _HTTP.match(data)) is not None:
        yield status[1].decode()
    if b"/peer" in head or (not is_to_server and b"octet-stream" in data):
        yield f"({len(data)} bytes)"
        return
    yield from dict.fromkeys(each.decode() for each in _METHOD.findall(data))
    yield from dict.fromkeys(each.decode() for each in _TAG.findall(data))
    yield from dict.fromkeys(each.decode() for each in _QUESTION.findall(data))
    yield from (f"reason {each.decode()}" for each in _REASON.findall(data))
    if b'"requestState"' in data:
        yield "with state"
    if b'"inputResponses"' in data:
        yield "with answers"
    if b'"result"' in data and b"input_required" not in data:
        yield "result"
    if b"input_required" in data:
        yield "input_required"


def lines(outcome: "Outcome", story: list[tuple[float, str]]) -> list[str]:
    """The story with the faults and the log, in order of time."""
    log = ((line.at, f"    {line.process}: {line.level} {line.event} {_short(line.fields)}") for line in outcome.lines)
    told = [*story, *((at, f"*** {what}") for at, what in outcome.noted), *log]
    return [f"{at - 1000:9.3f} {what}" for at, what in sorted(told, key=lambda each: each[0])]


def _short(fields: dict[str, Any]) -> str:
    return " ".join(f"{key}={str(value)[:100]}" for key, value in fields.items() if key != "exc_info")
