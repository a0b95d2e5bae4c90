"""Upstreams that pretty-print: whatever line ends their JSON has, a standard parser reads the events we write."""

import asyncio
import json
from typing import Any

import pytest

from tests.parts.launch import PARTS
from tests.support.fake_upstream import FORM, FakeUpstream, Turn, text
from tests.support.workbench import ACCEPT, DECLINE, Client

PYTHON = PARTS / "py130" / "bin" / "python"
READ = """
import json, sys, httpx, httpx_sse
url, headers, body = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
with httpx.Client(trust_env=False) as client:
    with httpx_sse.connect_sse(client, "POST", url, headers=headers, content=body) as source:
        print(json.dumps([event.json() for event in source.iter_sse()]))
"""
"""What the Python SDK reads streams with."""
ENDS = ["\n", "\r\n", "\r"]
TOKEN = {"progressToken": "p"}


def pretty(value: Any, end: str = "\n") -> bytes:
    return json.dumps(value, indent=2).replace("\n", end).encode()


def event(message: dict[str, Any], end: str) -> bytes:
    """A message as several `data:` lines, whose parser joins them by LF."""
    lines = [b"data: " + line for line in pretty({"jsonrpc": "2.0", **message}).split(b"\n")]
    return end.encode().join([*lines, b"", b""])


async def started(turn: Turn, end: str = "\n") -> None:
    """Make the reply to the client a stream, with a notification that is pretty-printed too."""
    token = turn.body["params"]["_meta"]["progressToken"]
    params = {"progressToken": token, "progress": 1, "message": "half", "more": {"a": [1, 2]}}
    await turn.raw(event({"method": "notifications/progress", "params": params}, end))


@pytest.mark.parametrize("end", ENDS, ids=repr)
async def test_whatever_a_server_pretty_prints_is_one_line_for_its_client(
    upstream: FakeUpstream, client: Client, end: str
) -> None:
    info = {"name": "fake", "version": "1", "title": "A\nB"}
    upstream.capabilities = {"tools": {}, "logging": {}}

    async def initialize(turn: Turn) -> None:
        upstream.known.add("s1")
        result = {"protocolVersion": "2025-11-25", "capabilities": upstream.capabilities, "serverInfo": info}
        message = pretty({"jsonrpc": "2.0", "id": turn.id, "result": result}, end)
        turn.reply(body=message, headers={"Mcp-Session-Id": "s1"})

    async def tool(turn: Turn) -> None:
        await started(turn, end)
        params = {"level": "error", "data": {"a": [1]}}
        await turn.raw(event({"method": "notifications/message", "params": params}, end))
        waiter = upstream.expect(turn.session, 7)
        await turn.raw(event({"id": 7, "method": "elicitation/create", "params": FORM}, end))
        if (await waiter)["result"]["action"] == "accept":
            result = {**text("x\r\ny"), "structuredContent": {"a": [1]}}
            await turn.raw(event({"id": turn.id, "result": result}, end))
        else:
            await turn.raw(event({"id": turn.id, "error": {"code": 5, "message": "no", "data": {"a": [1]}}}, end))

    upstream.on("initialize", initialize)
    upstream.tool(tool)
    meta = {**TOKEN, "io.modelcontextprotocol/logLevel": "info"}
    replies = []
    for answer in (ACCEPT, DECLINE):
        asked = await client.call(meta=meta)
        (question,) = asked.questions.values()
        assert question["params"]["requestedSchema"] == FORM["requestedSchema"]
        told, logged = asked.notifications
        assert told["params"]["more"] == {"a": [1, 2]}
        assert logged["params"]["data"] == {"a": [1]}
        replies += [asked, await client.answer(asked, answer)]
    for reply in replies[:3]:
        assert reply.result["_meta"]["io.modelcontextprotocol/serverInfo"] == info
    assert replies[1].text == "x\r\ny", "line ends within strings are escaped, and stay"
    assert replies[3].error["data"] == {"a": [1]}
    for reply in replies:
        fields = {line.partition(b":")[0] for line in reply.data.splitlines()} if reply.is_stream else set()
        assert fields <= {b"event", b"data", b""}, reply.data


@pytest.mark.real
async def test_the_parser_of_the_python_sdk_reads_a_pretty_printed_result(
    upstream: FakeUpstream, client: Client
) -> None:
    async def tool(turn: Turn) -> None:
        await started(turn, "\r\n")
        await turn.raw(event({"id": turn.id, "result": text("done")}, "\r\n"))

    upstream.tool(tool)
    headers, body = client.build("tools/call", {"name": "tool", "arguments": {}}, TOKEN)
    reading = await asyncio.create_subprocess_exec(
        *(str(PYTHON), "-c", READ, client.url, json.dumps(headers), body.decode()), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(20):
        printed, _ = await reading.communicate()
    told, last = json.loads(printed)
    assert told["method"] == "notifications/progress"
    assert last["result"]["content"][0]["text"] == "done"
