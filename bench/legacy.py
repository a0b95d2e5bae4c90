"""What an old client (2025-11-25) says here: the gateway passes its requests through."""

import msgspec

from bench import modern
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
        body = msgspec.json.encode({"jsonrpc": "2.0", "id": call_id, "method": "tools/call", "params": params})
        reply = await connection.request(HEAD.format(length=len(body)).encode() + body)
        modern.expect_text(modern.result_of(reply, call_id), marker)

    return operation


def large(tool: str, size: int, sent: int = 0) -> Operation:
    """Call a tool whose result has `size` bytes of text, with an argument of `sent` bytes."""
    padding = {"padding": "x" * sent} if sent else {}

    async def operation(connection: Connection) -> None:
        call_id = next(modern.ids)
        params = {"name": tool, "arguments": {"marker": f"m{call_id}|{size}", **padding}}
        body = msgspec.json.encode({"jsonrpc": "2.0", "id": call_id, "method": "tools/call", "params": params})
        reply = await connection.request(HEAD.format(length=len(body)).encode() + body)
        modern.expect_large(reply, call_id, size)

    return operation
