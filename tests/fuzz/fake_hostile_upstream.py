"""A FAKE legacy server that mutates what it says: heads, chunks, events, JSON, session ids, status codes.

With `hostility` 0 it is a plain server. Each answer depends on the request alone and on random numbers, so that it
cannot itself give one caller what belongs to another.
"""

import asyncio
import json
from contextlib import suppress
from typing import Any, Final

from tests.fuzz.mutator import Mutator
from tests.support.fake_http import FakeHttp, Wire

ECHO: Final = "echo"
ASK: Final = "ask"
_STATUSES: Final = (
    *(100, 101, 102, 103, 199, 200, 201, 202, 204, 205, 206, 226, 300, 301, 302, 304, 307, 308, 400, 401, 403, 404),
    *(405, 406, 408, 409, 410, 413, 421, 426, 429, 431, 451, 500, 501, 502, 503, 504, 511, 599, 600, 999),
)
_HEADERS: Final = (
    b"Mcp-Session-Id: \x1b[31m",
    b"Mcp-Session-Id: a\x01b",
    b"Mcp-Session-Id: \xff\xfe",
    b"Mcp-Session-Id: " + b"s" * 9000,
    b"Mcp-Session-Id: other",
    b"WWW-Authenticate: Bearer realm=\x01",
    b'WWW-Authenticate: Bearer resource_metadata="http://[]@/"',
    b"Location: http://[]@/",
    b"Location: /mcp",
    b"Location: //evil.example/",
    b"Content-Type: text/event-stream",
    b"Content-Type: text/html; charset=\xff",
    b"Content-Type: application/json; charset=utf-16",
    b"Content-Encoding: gzip",
    b"Content-Encoding: br",
    b"Transfer-Encoding: chunked",
    b"Content-Length: 0",
    b"Content-Length: -1",
    b"Content-Length: 99999999",
    b"Connection: upgrade\r\nUpgrade: websocket",
    b"Connection: close",
    b"Set-Cookie: a=b\x7f",
    b"X: " + b"y" * 20_000,
    b"Retry-After: 99999999999999999999",
    b"Keep-Alive: timeout=x",
)
_FORM: Final = {"message": "Name?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}}
_TOOLS: Final = [{"name": name, "inputSchema": {"type": "object", "properties": {}}} for name in (ECHO, ASK)]


class FakeHostileUpstream(FakeHttp):
    """The server; `mutator` decides everything that is random."""

    def __init__(self, mutator: Mutator, hostility: float) -> None:
        super().__init__(self._talk)
        self._mutator = mutator
        self._random = mutator.random
        self._hostility = hostility
        self._answers: dict[str, asyncio.Event] = {}
        self.last = b""
        """What it said last, for the report of a finding."""

    async def _talk(self, wire: Wire) -> None:
        with suppress(EOFError, TimeoutError, ValueError):  # a request that was cut, no answer, or nonsense
            while await self._answer(wire.writer, *_parts(await wire.request())):
                self.requests.clear()

    async def _answer(self, writer: asyncio.StreamWriter, method: str, headers: dict[str, str], body: bytes) -> bool:
        """Answer one request; whether the connection goes on."""
        message = _object(body)
        session = headers.get("mcp-session-id", "s1")
        if "method" not in message and "id" in message:
            self._answers.setdefault(session, asyncio.Event()).set()
        status, said = self._reply(method, message)
        if status == 200 and message.get("method") == "tools/call" and _target(message) == ASK:
            asked = {"jsonrpc": "2.0", "id": "q1", "method": "elicitation/create", "params": _FORM}
            self._answers[session] = asyncio.Event()
            await self._write(writer, 200, [asked], [])
            await asyncio.wait_for(self._answers[session].wait(), 5)
            return False
        named = [b"Mcp-Session-Id: %b" % self._session()] if message.get("method") == "initialize" else []
        return await self._write(writer, status, said, named)

    def _session(self) -> bytes:
        return b"s%d" % self._random.getrandbits(64)

    def _reply(self, method: str, message: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        """Status, and the messages of the body."""
        if method != "POST":
            return (405 if method == "GET" else 200), []
        if "id" not in message or "method" not in message:
            return 202, []
        said: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        results: dict[str, Any] = {
            "initialize": {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}, "resources": {}, "prompts": {}, "logging": {}},
                "serverInfo": {"name": "fake", "version": "1"},
            },
            "tools/list": {"tools": _TOOLS},
            "tools/call": {"content": [{"type": "text", "text": json.dumps(message.get("params"))}]},
            "resources/read": {"contents": [{"uri": "file:///a", "text": "x"}]},
            "resources/list": {"resources": []},
            "prompts/get": {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]},
            "prompts/list": {"prompts": []},
            "ping": {},
        }
        if str(message["method"]) not in results:
            return 200, [{**said, "error": {"code": -32601, "message": "Method not found"}}]
        noise = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}
        before = [noise] if self._random.random() < 0.3 else []
        return 200, [*before, {**said, "result": results[str(message["method"])]}]

    async def _write(
        self, writer: asyncio.StreamWriter, status: int, said: list[dict[str, Any]], headers: list[bytes]
    ) -> bool:
        """Write a reply; whether the connection goes on."""
        is_hostile = self._random.random() < self._hostility
        parts = [json.dumps(each).encode() for each in said]
        if is_hostile and self._random.random() < 0.4:
            parts = [self._mutator.mutate_json(part) for part in parts]
        waits = len(said) == 1 and "method" in said[0]
        is_stream = len(said) > 1 or waits or self._random.random() < 0.3
        body = b"".join(b"id: e%d\ndata: %b\n\n" % pair for pair in enumerate(parts)) if is_stream else b"".join(parts)
        if is_hostile and self._random.random() < 0.3:
            body = self._mutator.mutate(body)
        if is_hostile and self._random.random() < 0.3:
            status = self._random.choice(_STATUSES)
        if is_hostile and self._random.random() < 0.4:
            headers = [*headers, self._random.choice(_HEADERS)]
        kind = b"text/event-stream" if is_stream and said else b"application/json"
        framing = b"Transfer-Encoding: chunked" if is_stream else b"Content-Length: %d" % len(body)
        lines = [b"HTTP/1.1 %d Said" % status, b"Content-Type: " + kind, framing, *headers]
        chunk = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if waits else b"0\r\n\r\n")
        data = b"\r\n".join([*lines, b"", b""]) + (chunk if is_stream else body)
        if is_hostile and self._random.random() < 0.3:
            data = self._mutator.mutate(data)
        self.last = data
        if is_hostile and self._random.random() < 0.2:  # in pieces
            cut = self._random.randint(0, len(data))
            writer.write(data[:cut])
            await writer.drain()
            await asyncio.sleep(0.01)
            data = data[cut:]
        writer.write(data)
        await writer.drain()
        return not (is_hostile and self._random.random() < 0.5)


def _parts(request: bytes) -> tuple[str, dict[str, str], bytes]:
    """Method, headers and body."""
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return first.split(" ")[0], headers, body


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _target(message: dict[str, Any]) -> Any:
    params = message.get("params")
    return params.get("name") if isinstance(params, dict) else None
