"""The server of a story behind each link: over HTTP in the test's event loop, over stdio as a child."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from gateway.protocol import mcp
from tests.stories import server
from tests.stories.server import Json, asked, complete, modern_round, play, question, understood
from tests.support.fake_modern import Call, FakeModern
from tests.support.fake_sse import FakeSse, Message, Stream
from tests.support.fake_upstream import FakeUpstream, Turn

CAPABILITIES: Final[Json] = {"tools": {}, "logging": {}}


class Ledger:
    """What the server has done, a word a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def note(self, word: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{word}\n")

    def count(self, word: str) -> int:
        return self.path.read_text().split().count(word)


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def streamable(ledger: Ledger) -> AsyncIterator[Json]:
    fake = FakeUpstream()
    fake.capabilities = CAPABILITIES

    async def tool(turn: Turn) -> None:
        ledger.note("run")
        steps, given = play(turn.body["params"]), None
        while True:
            word, what = steps.send(given)  # type: ignore[arg-type]
            given = None
            if word == "notify":
                await turn.say(what)
            elif word == "ask":
                answers = await asyncio.gather(*(turn.ask(id_=name, **question(name)) for name in what))
                given = {name: understood(answer) for name, answer in zip(what, answers, strict=True)}
            elif word == "hang":
                await turn.raw(b"")
                await _for_ever()
            elif word == "die":
                await turn.reset()
            elif turn.response is not None:
                return await turn.say({"id": turn.id, **what})
            else:
                return turn.reply(body={"jsonrpc": "2.0", "id": turn.id, **what})

    async def cancelled(turn: Turn) -> None:
        ledger.note("cancelled")
        turn.reply(202)

    fake.tool(tool)
    fake.on(mcp.CANCELLED, cancelled)
    async with fake:
        yield {"url": fake.url}


@asynccontextmanager
async def http_sse(ledger: Ledger) -> AsyncIterator[Json]:
    fake = FakeSse()
    fake.version, fake.capabilities = mcp.LEGACY, CAPABILITIES
    running: dict[Any, asyncio.Task[None]] = {}
    open_: dict[str, asyncio.Future[Json]] = {}

    async def run(stream: Stream, message: Message) -> None:
        steps, given = play(message["params"]), None
        while True:
            word, what = steps.send(given)  # type: ignore[arg-type]
            given = None
            if word == "notify":
                stream.say(**what)
            elif word == "ask":
                for name in what:
                    open_[name] = asyncio.get_running_loop().create_future()
                    stream.say(id=name, **question(name))
                given = {name: understood(await open_[name]) for name in what}
            elif word == "hang":
                await _for_ever()
            elif word == "die":
                return stream.end()
            else:
                return stream.say(id=message["id"], **what)

    async def tool(_: FakeSse, stream: Stream, message: Message) -> None:
        ledger.note("run")
        running[message["id"]] = asyncio.get_running_loop().create_task(run(stream, message))

    async def post(message: Message) -> None:
        if message.get("method") == mcp.CANCELLED:
            ledger.note("cancelled")
            _ = running[message["params"]["requestId"]].cancel()
        elif "method" not in message:
            open_[message["id"]].set_result(message)

    fake.tool, fake.post = tool, post
    async with fake:
        try:
            yield {"url": fake.url}
        finally:
            for task in running.values():
                _ = task.cancel()
            _ = await asyncio.gather(*running.values(), return_exceptions=True)


@asynccontextmanager
async def modern_http(ledger: Ledger) -> AsyncIterator[Json]:
    fake = FakeModern()

    async def tool(call: Call) -> Json:
        ledger.note("run")
        past, steps = modern_round(call.params)
        for word, what in steps:
            if word == "notify":
                await call.send({"jsonrpc": "2.0", **what})
            elif word == "hang":
                try:
                    await _for_ever()
                except asyncio.CancelledError:
                    ledger.note("cancelled")
                    raise
            elif word == "die":
                call.abort()
                raise asyncio.CancelledError
            else:
                return asked(what, past) if word == "ask" else complete(what)
        raise AssertionError

    fake.tools["story"] = tool
    async with fake:
        yield {"url": fake.url}


def _child(era: str) -> Any:
    @asynccontextmanager
    async def child(ledger: Ledger) -> AsyncIterator[Json]:
        yield {"command": [sys.executable, "-I", "-S", server.__file__, str(ledger.path), era], "warm": 0}

    return child


LINKS: Final = {
    "streamable HTTP": streamable,
    "HTTP+SSE": http_sse,
    "stdio": _child("legacy"),
    "modern HTTP": modern_http,
    "modern stdio": _child("modern"),
}
