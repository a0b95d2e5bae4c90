"""What an old client (2025-11-25) says here: the gateway passes its requests through."""

import asyncio
from typing import Any

import msgspec

from bench import modern
from bench.http1 import Message
from bench.load import Connection, Operation

HEAD = (
    "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json, text/event-stream\r\n"
    "Content-Type: application/json\r\nMCP-Protocol-Version: 2025-11-25\r\nContent-Length: {length}\r\n\r\n"
)


def echo(tool: str) -> Operation:
    """Call a tool that answers at once, without a session, which the upstream allows."""

    async def operation(connection: Connection) -> None:
        call_id = next(modern.ids)
        marker = f"m{call_id}"
        params = {"name": tool, "arguments": {"marker": marker}}
        reply = await connection.request(post({"id": call_id, "method": "tools/call", "params": params}))
        modern.expect_text(modern.result_of(reply, call_id), marker)

    return operation


def echo_in_session(tool: str) -> Operation:
    """As `echo`, in sessions that are opened by the first operations and kept for all others."""
    idle: list[str] = []

    async def operation(connection: Connection) -> None:
        session = idle.pop() if idle else await open_session(connection)
        call_id = next(modern.ids)
        marker = f"m{call_id}"
        params = {"name": tool, "arguments": {"marker": marker}}
        reply = await connection.request(post({"id": call_id, "method": "tools/call", "params": params}, session))
        modern.expect_text(modern.result_of(reply, call_id), marker)
        idle.append(session)

    return operation


async def open_session(connection: Connection) -> str:
    """The id of a new session; empty if the server keeps none."""
    client = {"name": "bench", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
    opened = await connection.request(post({"id": 0, "method": "initialize", "params": params}))
    session = opened.header(b"mcp-session-id").decode()
    _ = await connection.request(post({"method": "notifications/initialized"}, session))
    return session


def large(tool: str, size: int, sent: int = 0) -> Operation:
    """Call a tool whose result has `size` bytes of text, with an argument of `sent` bytes."""
    padding = {"padding": "x" * sent} if sent else {}

    async def operation(connection: Connection) -> None:
        call_id = next(modern.ids)
        params = {"name": tool, "arguments": {"marker": f"m{call_id}|{size}", **padding}}
        reply = await connection.request(post({"id": call_id, "method": "tools/call", "params": params}))
        modern.expect_large(reply, call_id, size)

    return operation


class Session(Connection):
    """The session of a client, and the connection for its calls, of whose replies it reads the first event early."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.id = ""
        self._came = b""
        self._first: asyncio.Future[bytes] | None = None

    def data_received(self, data: bytes) -> None:
        if self._first is not None and not self._first.done():
            self._came += data
            _, is_here, event = self._came.partition(b"\ndata: ")
            if is_here and b"\n\n" in event:
                self._first.set_result(event.partition(b"\n\n")[0])
        super().data_received(data)

    async def ask(self, data: bytes) -> tuple[dict[str, Any], asyncio.Task[Message]]:
        """Send a call; its question, and what ends with its whole reply."""
        self._came, self._first = b"", asyncio.get_running_loop().create_future()
        reply = asyncio.get_running_loop().create_task(self.request(data))
        return msgspec.json.decode(await self._first), reply


def post(message: dict[str, Any], session: str = "") -> bytes:
    body = msgspec.json.encode({"jsonrpc": "2.0", **message})
    head = HEAD.replace("Content-Length", f"Mcp-Session-Id: {session}\r\nContent-Length") if session else HEAD
    return head.format(length=len(body)).encode() + body


async def ask(connection: Connection) -> None:
    """A call with a question on its stream, whose answer goes out beside it; the client keeps its session."""
    session = connection.kept("session", lambda: Session(connection.address))
    assert isinstance(session, Session)
    if not session.id:
        opened = await connection.request(post({"id": 0, "method": "initialize", "params": {}}))
        session.id = opened.header(b"mcp-session-id").decode()
    call_id = next(modern.ids)
    params = {"name": "ask", "arguments": {"marker": f"m{call_id}"}}
    question, reply = await session.ask(post({"id": call_id, "method": "tools/call", "params": params}, session.id))
    answer = {"action": "accept", "content": {"marker": f"a{call_id}"}}
    _ = await connection.request(post({"id": question["id"], "result": answer}, session.id))
    modern.expect_text(modern.result_of(await reply, call_id), f"m{call_id}/a{call_id}")
