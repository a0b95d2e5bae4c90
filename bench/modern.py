"""What a modern client (2026-07-28) says here, with a marker in each call to catch a mixed-up answer."""

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.http1 import Message
from bench.load import Connection, Operation, Wrong
from gateway.config.model.config import Hold

VERSION = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}},
}
HEAD = (
    "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json, text/event-stream\r\n"
    f"Content-Type: application/json\r\nMCP-Protocol-Version: {VERSION}\r\nMcp-Method: tools/call\r\n"
    "Mcp-Name: {name}\r\nContent-Length: {length}\r\n\r\n"
)
# As much of a reply that is wrong is in the complaint; an error ends with its reason.
SHOWN = 600
# Never the same twice in a run, so that an answer from an earlier slice is as wrong as one from another call.
ids = itertools.count(1)


def call(call_id: int, name: str, marker: str, padding: str = "", **more: Any) -> bytes:
    arguments = {"marker": marker, "padding": padding} if padding else {"marker": marker}
    params = {"name": name, "arguments": arguments, "_meta": META, **more}
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": call_id, "method": "tools/call", "params": params})
    return HEAD.format(name=name, length=len(body)).encode() + body


def raw_call(call_id: int, name: str, argument: bytes) -> bytes:
    """A call with one argument that is JSON already."""
    meta = msgspec.json.encode(META)
    params = b'{"name":"%b","arguments":{"marker":"m","large":%b},"_meta":%b}' % (name.encode(), argument, meta)
    body = b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":%b}' % (call_id, params)
    return HEAD.format(name=name, length=len(body)).encode() + body


def call_hostile(call_id: int, wanted: str) -> bytes:
    return call(call_id, "hostile", wanted)


def read_resource(call_id: int, uri: str) -> bytes:
    params = {"uri": uri, "_meta": META}
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": call_id, "method": "resources/read", "params": params})
    head = HEAD.format(name=uri, length=len(body)).replace("Method: tools/call", "Method: resources/read")
    return head.encode() + body


def result_of(reply: Message, call_id: int) -> dict[str, Any]:
    """The result for this id, from a JSON reply or from the last event of an SSE reply."""
    body = reply.body
    if reply.header(b"content-type").startswith(b"text/event-stream"):
        body = (b"\n" + body).rpartition(b"\ndata:")[2]
    try:
        message = msgspec.json.decode(body) if reply.status == 200 else {}
    except msgspec.MsgspecError as exc:
        raise Wrong(f"{exc}: {reply.body[:200].decode(errors='replace')}") from exc
    if message.get("id") != call_id or "result" not in message:
        raise Wrong(f"HTTP {reply.status} for id {call_id}: {reply.body[:SHOWN].decode(errors='replace')}")
    result: dict[str, Any] = message["result"]
    return result


def expect_text(result: dict[str, Any], text: str) -> None:
    content = result.get("content") or [{}]
    if content[0].get("text") != text:
        raise Wrong(f"expected the text {text!r}: {result}")


def echo(tool: str) -> Operation:
    """Call a tool that answers at once."""

    async def operation(connection: Connection) -> None:
        call_id = next(ids)
        marker = f"m{call_id}"
        reply = await connection.request(call(call_id, tool, marker))
        expect_text(result_of(reply, call_id), marker)

    return operation


def two_echoes(tool: str) -> Operation:
    """Call a tool twice, as far apart as the requests of an ask, between which the gateway waits for more questions.

    Without the pause the anchor would always be busy. A process that idles costs more, because each message wakes it.
    """
    once = echo(tool)

    async def operation(connection: Connection) -> None:
        await once(connection)
        await asyncio.sleep(Hold().quiet_seconds)
        await once(connection)

    return operation


def echo_of_another_client(tool: str) -> Operation:
    """As `echo`, as a client that was not there before: a session is opened for it, and its tools are listed."""

    async def operation(connection: Connection) -> None:
        call_id = next(ids)
        marker = f"m{call_id}"
        client = {"io.modelcontextprotocol/clientInfo": {"name": f"bench {call_id}", "version": "1"}}
        reply = await connection.request(call(call_id, tool, marker, _meta={**META, **client}))
        expect_text(result_of(reply, call_id), marker)

    return operation


def expect_large(reply: Message, call_id: int, size: int) -> None:
    """The result of `large`, for this id."""
    result = result_of(reply, call_id)
    text = (result.get("content") or [{}])[0].get("text", "")
    if not text.startswith(f"m{call_id}|") or len(text) != size:
        raise Wrong(f"expected {size} characters for m{call_id}: {text[:80]!r}")


def large(tool: str, size: int, sent: int = 0) -> Operation:
    """Call a tool whose result has `size` bytes of text, with an argument of `sent` bytes."""
    padding = "x" * sent

    async def operation(connection: Connection) -> None:
        call_id = next(ids)
        reply = await connection.request(call(call_id, tool, f"m{call_id}|{size}", padding))
        expect_large(reply, call_id, size)

    return operation


@dataclass(frozen=True, slots=True)
class Parked:
    """A call that the gateway holds, as its client remembers it."""

    marker: str
    key: str
    request_state: str


async def open_ask(connection: Connection, tool: str = "ask") -> Parked:
    """First round: the call, up to the question."""
    call_id = next(ids)
    marker = f"m{call_id}"
    result = result_of(await connection.request(call(call_id, tool, marker)), call_id)
    if result.get("resultType") != "input_required":
        raise Wrong(f"expected input_required: {result}")
    requests = result.get("inputRequests") or {}
    asked = [request.get("params", {}).get("message") for request in requests.values()]
    if asked != [f"Say {marker}"] or "requestState" not in result:
        raise Wrong(f"expected one question for {marker}, and a requestState: {result}")
    return Parked(marker, next(iter(requests)), result["requestState"])


async def answer_ask(connection: Connection, parked: Parked, tool: str = "ask") -> None:
    """Second round: the answer, up to the result, which must join this call's marker to this answer's."""
    call_id = next(ids)
    answer = {parked.key: {"action": "accept", "content": {"marker": f"a{call_id}"}}}
    retry = call(call_id, tool, parked.marker, inputResponses=answer, requestState=parked.request_state)
    result = result_of(await connection.request(retry), call_id)
    if result.get("resultType") != "complete":
        raise Wrong(f"expected complete: {result}")
    expect_text(result, f"{parked.marker}/a{call_id}")


async def ask(connection: Connection) -> None:
    await answer_ask(connection, await open_ask(connection))


def ask_answered_at(address: str) -> Operation:
    """The question comes on one connection, and the answer goes out on a second one to this address."""

    async def operation(connection: Connection) -> None:
        await answer_ask(connection.beside(address), await open_ask(connection))

    return operation
