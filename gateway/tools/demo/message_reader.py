"""Reads the MCP messages from a copy of one direction of an HTTP/1.1 connection.

For display only: it skips what it cannot read, and never touches the traffic. It shares no code with the gateway, so
that it shows what was really sent, even if the gateway would parse it differently.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

Side = Literal["old", "new"]
HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class WireMessage:
    """A JSON-RPC message, or an HTTP request or error without one."""

    side: Side
    to_server: bool
    start: str
    headers: dict[str, str]
    body: dict[str, Any] | None
    streamed: bool = False


async def watch(
    reader: asyncio.StreamReader, side: Side, *, to_server: bool, seen: Callable[[WireMessage], None]
) -> None:
    """Report each message of one direction as soon as it is complete, until the stream ends."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            start, *fields = head.rstrip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (f.partition(":") for f in fields)}
            streamed = headers.get("content-type", "").startswith("text/event-stream")
            chunks = _chunks(reader, headers, start)
            found = False
            async for text in _events(chunks) if streamed else _whole(chunks):
                for body in _messages(text):
                    found = True
                    seen(WireMessage(side, to_server, start, headers, body, streamed))
            if not found and _speaks_without_body(start):
                seen(WireMessage(side, to_server, start, headers, None))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError):
        return


def _speaks_without_body(start: str) -> bool:
    return start.startswith(("GET ", "DELETE ")) or (start.startswith("HTTP/") and start.split()[1] >= "400")


def _messages(text: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(text)
    except ValueError:
        return []
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]


async def _chunks(reader: asyncio.StreamReader, headers: dict[str, str], start: str) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    elif start.startswith("HTTP/") and start.split()[1] not in {"100", "204", "304"}:
        while data := await reader.read(1 << 16):
            yield data


async def _whole(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    yield b"".join([chunk async for chunk in chunks]).decode(errors="replace")


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    data: list[str] = []
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                yield "\n".join(data)
                data = []
