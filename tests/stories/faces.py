"""The client of a story at each face. It writes down what it sees, in its own words, as lines of a dialogue."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, NamedTuple

import aiohttp
import pytest

from gateway.config import parse
from gateway.protocol import mcp
from gateway.server import wrap
from tests.stories.server import ELICIT, PROGRESS, Json
from tests.support import workbench
from tests.support.host import initialize, modern
from tests.support.legacy_client import LegacyClient, SseClient, Stream
from tests.support.workbench import DEADLINE, configuration, eventually

TOKEN: Final = "t"
FORMS: Final[Json] = {"elicitation": {"form": {}}}
Lines = list[str]


class Client(NamedTuple):
    """What a client declares and does in a story."""

    answers: Mapping[str, Any] = {}
    """A result for each name that it is asked for; None if it refuses the question with an error."""
    capabilities: Json = FORMS
    leaves_at: str = ""
    """It cancels the call when it has seen this line."""
    pads: int = 0
    """It sends so many bytes that mean nothing."""


class Left(Exception):
    """The client has given its call up."""


def line_of(message: Json) -> str:
    """What a client makes of a message that is no question."""
    params = message.get("params", {})
    if "method" in message:
        if message["method"] == PROGRESS:
            assert params["progressToken"] == TOKEN
            return f"progress {params['progress']}"
        assert message["method"] == mcp.LOG
        return f"log {params['data']}"
    if error := message.get("error"):
        return f"error {(error.get('data') or {}).get('reason', error['code'])}"
    result = message["result"]
    return f"{'failed' if result.get('isError') else 'done'} {result['content'][0]['text']}".strip()


def call_params(told: Client, steps: Lines) -> Json:
    arguments = {"steps": steps, "pad": "x" * told.pads}
    return {"name": "story", "arguments": arguments, "_meta": {"progressToken": TOKEN}}


class Diary:
    """What one client has seen."""

    def __init__(self, client: Client, server_heard: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self.server_heard = server_heard
        """Waits until the server has heard that the client left, before it closes anything more."""
        self.lines: Lines = []

    def note(self, line: str) -> None:
        self.lines.append(line)
        if line == self._client.leaves_at:
            raise Left

    def answer(self, name: str) -> Any:
        self.note(f"asked {name}")
        return self._client.answers[name]


# -- legacy clients ---------------------------------------------------------------------------------------------------


async def converse(read: Callable[[], Awaitable[Json]], send: Callable[[Json], Awaitable[Any]], diary: Diary) -> None:
    """Read up to the end of the call, and answer what is asked."""
    while True:
        message = await read()
        if message.get("method") == ELICIT:
            result = diary.answer(message["params"]["message"])
            refusal = {"code": -1, "message": "User rejected"}
            await send({"id": message["id"], **({"error": refusal} if result is None else {"result": result})})
            continue
        diary.note(line_of(message))
        if "method" not in message:
            return


async def legacy_call(client: LegacyClient, told: Client, steps: Lines, diary: Diary) -> None:
    """A call over streamable HTTP or HTTP+SSE, in a session of its own."""
    client.capabilities = told.capabilities
    await client.initialize()
    level = {"id": "level", "method": "logging/setLevel", "params": {"level": "info"}}
    message = {"method": mcp.TOOLS_CALL, "params": call_params(told, steps), "id": "call"}  # in the SDKs' order
    await client.post(level)
    if isinstance(client, SseClient):
        stream = client.stream
        assert "result" in await stream.message()
        if (status := (await client.post(message))[0]) != 202:
            stream.close()
            return diary.note(f"refused by {status}")
    else:
        stream = await client.open(message)

    try:
        await converse(stream.message, client.post, diary)
    except Left:
        await client.post({"method": mcp.CANCELLED, "params": {"requestId": "call"}})
        await diary.server_heard()
    finally:
        stream.close()


# -- modern clients ---------------------------------------------------------------------------------------------------


async def rounds(send: Callable[[Json], Awaitable[Json]], told: Client, steps: Lines, diary: Diary) -> None:
    """Call again with the answers until the call ends; `send` notes notifications, and returns the response."""
    params = call_params(told, steps)
    while True:
        message = await send(params)
        if message.get("result", {}).get("resultType") != "input_required":
            return diary.note(line_of(message))
        asked = message["result"]["inputRequests"]
        answers = {key: diary.answer(each["params"]["message"]) for key, each in asked.items()}
        params = {**params, "inputResponses": answers, "requestState": message["result"]["requestState"]}


# -- over HTTP --------------------------------------------------------------------------------------------------------

Play = Callable[[Client, Lines, Diary], Awaitable[None]]


def over_http(play: Callable[[workbench.Stand, Client, Lines, Diary], Awaitable[None]]) -> Any:
    """A face of a gateway that listens."""

    @asynccontextmanager
    async def face(sections: Json, _: pytest.MonkeyPatch) -> AsyncIterator[Play]:
        async with aiohttp.ClientSession() as http:
            stand = await workbench.start("", http, **sections)

            async def played(told: Client, steps: Lines, diary: Diary) -> None:
                try:
                    await play(stand, told, steps, diary)
                except (aiohttp.ClientError, EOFError):
                    diary.note("cut off")

            try:
                yield played
                at_rest = "what is over weighs nothing, and only a parked call weighs anything"
                await eventually(lambda: not stand.gateway.calls.used or len(stand.gateway.lot) > 0, at_rest)
                assert stand.metric("mcp_gateway_task_failures_total") == 0
            finally:
                await stand.gateway.close()

    return face


async def modern_http(stand: workbench.Stand, told: Client, steps: Lines, diary: Diary) -> None:
    client = stand.client(capabilities=told.capabilities)

    async def send(params: Json) -> Json:
        meta = {**params["_meta"], mcp.META_LOG_LEVEL: "info"}
        async with asyncio.timeout(DEADLINE), client.open(mcp.TOOLS_CALL, params, meta=meta) as response:
            stream = Stream(response)
            while True:
                message = await stream.message()
                if "method" not in message:
                    return message
                diary.note(line_of(message))

    try:
        await rounds(send, told, steps, diary)
    except Left:  # closing the reply is what cancels
        await diary.server_heard()


async def legacy_http(stand: workbench.Stand, told: Client, steps: Lines, diary: Diary) -> None:
    await legacy_call(LegacyClient(stand), told, steps, diary)


async def legacy_sse(stand: workbench.Stand, told: Client, steps: Lines, diary: Diary) -> None:
    await legacy_call(SseClient(stand), told, steps, diary)


# -- over stdio -------------------------------------------------------------------------------------------------------


class Pipes:
    """The host's end of a gateway that serves it in the same event loop."""

    def __init__(self, reader: asyncio.StreamReader, stdin: int) -> None:
        self._reader, self._stdin = reader, stdin

    async def send(self, message: Json) -> None:
        line = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        _ = await asyncio.to_thread(os.write, self._stdin, line)  # the reader of the pipe is in this event loop

    async def read(self) -> Json:
        async with asyncio.timeout(DEADLINE):
            line = await self._reader.readline()
        assert line, "the stream has ended"
        message: Json = json.loads(line)
        return message


@asynccontextmanager
async def hosted(sections: Json, patch: pytest.MonkeyPatch) -> AsyncIterator[Pipes]:
    """Run `wrap` between two pipes."""
    (stdin, to_gateway), (from_gateway, stdout) = os.pipe(), os.pipe()
    patch.setattr(wrap, "take_standard_streams", lambda: (stdin, stdout))
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 24)
    patch.setattr(wrap, "on_signal", loop.add_signal_handler)  # the handlers of the tests outlive this loop
    source = os.fdopen(from_gateway, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    config = parse(configuration("", **sections), "test", {})
    serving = loop.create_task(wrap.wrap(config))
    try:
        yield Pipes(reader, to_gateway)
    finally:
        os.close(to_gateway)
        async with asyncio.timeout(DEADLINE):
            await serving
        transport.close()


def over_stdio(play: Callable[[Pipes, Client, Lines, Diary], Awaitable[None]]) -> Any:
    """A face of a gateway that a host starts; each story has a host of its own."""

    @asynccontextmanager
    async def face(sections: Json, patch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
        async def played(told: Client, steps: Lines, diary: Diary) -> None:
            async with hosted(sections, patch) as pipes:
                await play(pipes, told, steps, diary)

        yield played

    return face


async def modern_stdio(pipes: Pipes, told: Client, steps: Lines, diary: Diary) -> None:
    ids = itertools.count(1)
    now = 0

    async def send(params: Json) -> Json:
        nonlocal now
        now = next(ids)
        own = {**params["_meta"], mcp.META_LOG_LEVEL: "info", mcp.META_CAPABILITIES: told.capabilities}
        await pipes.send(modern(mcp.TOOLS_CALL, now, meta=own, **{k: v for k, v in params.items() if k != "_meta"}))
        while "method" in (message := await pipes.read()):
            diary.note(line_of(message))
        return message

    try:
        await rounds(send, told, steps, diary)
    except Left:
        await pipes.send({"method": mcp.CANCELLED, "params": {"requestId": now}})
        await diary.server_heard()


async def legacy_stdio(pipes: Pipes, told: Client, steps: Lines, diary: Diary) -> None:
    greeting = initialize()
    greeting["params"]["capabilities"] = told.capabilities
    await pipes.send(greeting)
    assert "result" in await pipes.read()
    await pipes.send({"method": mcp.INITIALIZED})
    await pipes.send({"id": "level", "method": "logging/setLevel", "params": {"level": "info"}})
    assert "result" in await pipes.read()
    await pipes.send({"id": "call", "method": mcp.TOOLS_CALL, "params": call_params(told, steps)})
    try:
        await converse(pipes.read, pipes.send, diary)
    except Left:
        await pipes.send({"method": mcp.CANCELLED, "params": {"requestId": "call"}})
        await diary.server_heard()


Face = Callable[[Json, pytest.MonkeyPatch], AbstractAsyncContextManager[Play]]
"""It takes the sections of the configuration."""
FACES: Final[dict[str, Face]] = {
    "modern HTTP": over_http(modern_http),
    "modern stdio": over_stdio(modern_stdio),
    "streamable HTTP": over_http(legacy_http),
    "HTTP+SSE": over_http(legacy_sse),
    "stdio": over_stdio(legacy_stdio),
}
