"""A fake legacy server, fast on purpose.

A real SDK server spends about ten times the CPU of the gateway on each request: in front of one, any gateway
looks free and the machine is never busy with what we measure. So this one is raw asyncio on uvloop with
hand-written HTTP/1.1, and speaks only as much of 2025-11-25 as the benchmarks use. The tests of the gateway
use real servers.

Tools: `echo` (JSON reply), `echo_sse` (the same as one SSE event), `large` and `large_sse`, whose results are as long
as the marker says, `hostile` (hostile.py) and `ask`, which asks the user on its own stream and returns `<marker of the
arguments>/<marker of the answer>`, so that an answer at the wrong call is visible. Ids of nested requests count from 0
in each session, as in real servers: alone they name nothing. `ask_stored` does the same with event ids. It remembers
nothing of a call whose stream is closed: the event id has all that it needs when the stream is resumed. `executions`
returns how many calls that ask began, and how many different markers they had.

All but `ask` also answer without a session, which is what the plain forwarders are measured with.
"""

import argparse
import asyncio
import uuid
from dataclasses import dataclass, field
from functools import cache
from typing import cast

import msgspec
import uvloop

from bench import hostile
from bench.http1 import Message, Reader

MISSING = msgspec.Raw(b"")
TOOLS = msgspec.json.encode(
    [
        {
            "name": name,
            "inputSchema": {"type": "object", "properties": {"marker": {"type": "string"}}},
        }
        for name in ("echo", "echo_sse", "large", "large_sse", "ask", "ask_stored", "hostile")
    ]
)
INITIALIZED = (
    b'{"protocolVersion":"2025-11-25","capabilities":{"tools":{},"resources":{},"logging":{}},'
    b'"serverInfo":{"name":"bench-upstream","version":"1"}}'
)
QUESTION = (
    b'{"jsonrpc":"2.0","id":%d,"method":"elicitation/create","params":{"mode":"form","message":"Say %b",'
    b'"requestedSchema":{"type":"object","properties":{"marker":{"type":"string"}},"required":["marker"]}}}'
)


class Marked(msgspec.Struct):
    """Arguments of a call, and content of an answer."""

    marker: str = ""


class Params(msgspec.Struct):
    """What a request is read for."""

    name: str = ""
    uri: str = ""
    arguments: Marked = msgspec.field(default_factory=Marked)


class Answer(msgspec.Struct):
    """The result of an elicitation."""

    action: str = ""
    content: Marked | None = None


class Incoming(msgspec.Struct):
    """Any JSON-RPC message. The id stays raw, so that it goes back with its JSON type."""

    id: msgspec.Raw = MISSING
    method: str = ""
    params: Params = msgspec.field(default_factory=Params)
    result: Answer = msgspec.field(default_factory=Answer)


decode = msgspec.json.Decoder(Incoming).decode


@dataclass(slots=True)
class Question:
    """A call of `ask` that waits for its answer."""

    call: "Connection"
    call_id: bytes
    marker: str


@dataclass(slots=True)
class State:
    """What the connections share: sessions with their next nested id, and the open questions."""

    sessions: dict[bytes, int] = field(default_factory=dict)
    streams: dict[bytes, "Connection"] = field(default_factory=dict)
    questions: dict[tuple[bytes, bytes], Question] = field(default_factory=dict)
    executions: int = 0
    markers: set[str] = field(default_factory=set)
    """Of all calls that ask: a call that is executed twice brings none."""


def text_result(call_id: bytes, text: str) -> bytes:
    return response(call_id, b'{"content":[{"type":"text","text":%b}],"isError":false}' % msgspec.json.encode(text))


def large_result(call_id: bytes, marker: str) -> bytes:
    """A text of the size behind the marker's bar, which begins with the marker."""
    size = int(marker.partition("|")[2])
    return text_result(call_id, marker + padding(size - len(marker)))


@cache
def padding(size: int) -> str:
    """Text without one repeated byte, as results are."""
    return ("lorem ipsum dolor sit amet " * (size // 27 + 1))[:size]


def response(call_id: bytes, result: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (call_id, result)


def error(call_id: bytes, code: int, text: str) -> bytes:
    body = msgspec.json.encode({"code": code, "message": text})
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (call_id or b"null", body)


class Connection(asyncio.Protocol):
    """One TCP connection: reads requests and writes replies, at once or later for a held stream."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._reader = Reader()
        self._open_question: tuple[bytes, bytes] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._open_question is not None:
            self._state.questions.pop(self._open_question, None)
        if exc is not None and not isinstance(exc, ConnectionError):
            raise exc

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            verb = message.head[:4]
            if verb == b"post":
                self._post(message)
            elif verb == b"get ":
                self._get(message.header(b"mcp-session-id"), message.header(b"last-event-id"))
            elif verb == b"dele":
                self._delete(message.header(b"mcp-session-id"))
            else:
                self._reply(b"405 Method Not Allowed", b"")

    def _post(self, message: Message) -> None:
        try:
            incoming = decode(message.body)
        except msgspec.MsgspecError as exc:
            self._reply(b"400 Bad Request", error(b"", -32700, str(exc)))
            return
        session = message.header(b"mcp-session-id")
        call_id = bytes(incoming.id)
        if session and session not in self._state.sessions:
            self._reply(b"404 Not Found", error(call_id, -32001, "Session not found"))
        elif not incoming.method:
            self._answer(session, call_id, incoming.result)
        elif not call_id:
            self._reply(b"202 Accepted", b"")
        else:
            self._request(session, call_id, incoming)

    def _request(self, session: bytes, call_id: bytes, incoming: Incoming) -> None:
        match incoming.method:
            case "tools/call":
                self._call(session, call_id, incoming.params)
            case "initialize":
                session = uuid.uuid4().hex.encode()
                self._state.sessions[session] = 0
                self._reply(b"200 OK", response(call_id, INITIALIZED), b"Mcp-Session-Id: %b\r\n" % session)
            case "tools/list":
                self._reply(b"200 OK", response(call_id, b'{"tools":%b}' % TOOLS))
            case "resources/read":
                self._hostile(call_id, incoming.params.uri)
            case "ping" | "logging/setLevel":
                self._reply(b"200 OK", response(call_id, b"{}"))
            case "server/discover":
                # What the real servers say to the modern probe.
                self._reply(b"400 Bad Request", error(call_id, -32600, "Bad Request: no valid session ID"))
            case method:
                self._reply(b"200 OK", error(call_id, -32601, f"Method not found: {method}"))

    def _call(self, session: bytes, call_id: bytes, params: Params) -> None:
        marker = params.arguments.marker
        match params.name:
            case "echo":
                self._reply(b"200 OK", text_result(call_id, marker))
            case "echo_sse":
                self._stream(text_result(call_id, marker), last=True)
            case "large":
                self._reply(b"200 OK", large_result(call_id, marker))
            case "large_sse":
                self._stream(large_result(call_id, marker), last=True)
            case "hostile":
                self._hostile(call_id, marker)
            case "executions":
                state = self._state
                self._reply(b"200 OK", text_result(call_id, f"{state.executions} {len(state.markers)}"))
            case "ask" | "ask_stored" if session:
                number = self._state.sessions[session]
                self._state.sessions[session] = number + 1
                self._state.executions += 1
                self._state.markers.add(marker)
                self._wait(session, b"%d" % number, call_id, marker)
                place = b"%d~%b~%b" % (number, call_id, marker.encode()) if params.name == "ask_stored" else b""
                self._stream(QUESTION % (number, marker.encode()), event_id=place)
            case "ask" | "ask_stored":
                self._reply(b"400 Bad Request", error(call_id, -32600, "Bad Request: Missing session ID"))
            case name:
                self._reply(b"200 OK", error(call_id, -32602, f"Unknown tool: {name}"))

    def _wait(self, session: bytes, number: bytes, call_id: bytes, marker: str) -> None:
        """The result of a call goes out here, after the answer to its question."""
        self._open_question = (session, number)
        self._state.questions[self._open_question] = Question(self, call_id, marker)

    def _answer(self, session: bytes, nested_id: bytes, answer: Answer) -> None:
        """202 whatever it is, as real servers do: only the result on the call's stream proves anything."""
        self._reply(b"202 Accepted", b"")
        question = self._state.questions.pop((session, nested_id), None)
        if question is None:
            return
        given = answer.content.marker if answer.content is not None else answer.action
        question.call.finish(text_result(question.call_id, f"{question.marker}/{given}"))

    def _get(self, session: bytes, last_event_id: bytes) -> None:
        if session not in self._state.sessions:
            self._reply(b"400 Bad Request", error(b"", -32600, "Bad Request: Missing session ID"))
            return
        if last_event_id:
            number, call_id, marker = last_event_id.split(b"~")
            self._wait(session, number, call_id, marker.decode())
            self._stream(b"")
            return
        self._state.streams[session] = self
        self._stream(b"")

    def _delete(self, session: bytes) -> None:
        self._state.sessions.pop(session, None)
        stream = self._state.streams.pop(session, None)
        if stream is not None:
            stream.close_stream()
        self._reply(b"200 OK", b"")

    def _hostile(self, call_id: bytes, wanted: str) -> None:
        name, _, size = wanted.partition("|")
        body, is_stream = hostile.reply(name, int(size), call_id)
        kind = b"text/event-stream" if is_stream else b"application/json"
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)
        )

    def finish(self, result: bytes) -> None:
        """The result of a call whose stream was kept open."""
        self._open_question = None
        self._transport.write(chunk(result) + b"0\r\n\r\n")

    def close_stream(self) -> None:
        self._transport.write(b"0\r\n\r\n")

    def _reply(self, status: bytes, body: bytes, more: bytes = b"") -> None:
        self._transport.write(
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
            % (status, more, len(body), body)
        )

    def _stream(self, first: bytes, *, last: bool = False, event_id: bytes = b"") -> None:
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        body = (chunk(first, event_id) if first else b"") + (b"0\r\n\r\n" if last else b"")
        self._transport.write(head + body)


def chunk(message: bytes, event_id: bytes = b"") -> bytes:
    """One SSE event in one HTTP chunk."""
    event = (b"id: %b\n" % event_id if event_id else b"") + b"event: message\ndata: %b\n\n" % message
    return b"%x\r\n%b\r\n" % (len(event), event)


async def serve(port: int) -> None:
    state = State()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(state), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a fast fake 2025-11-25 server")
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))
