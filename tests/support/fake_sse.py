"""A FAKE server of HTTP+SSE (2024-11-05) that misbehaves on command.

GET /sse opens a stream that says what `endpoint` is set to, and then what is put on it; POST /messages is answered as
`post` says. `initialize` is answered by itself.
"""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tests.support.fake_upstream import DEADLINE, SSE, event
from tests.support.served import Served

Message = dict[str, Any]
Script = Callable[["FakeSse", "Stream", Message], Awaitable[None]]


class Stream:
    """One session: its open stream and its messages."""

    def __init__(self, number: int, headers: Any) -> None:
        self.number = number
        self.headers = headers
        self.out: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.heard: list[Message] = []
        self.closed = asyncio.Event()

    def raw(self, data: bytes) -> None:
        self.out.put_nowait(data)

    def say(self, **message: Any) -> None:
        self.raw(event({"jsonrpc": "2.0", **message}))

    def end(self) -> None:
        self.out.put_nowait(None)


class FakeSse(Served):
    """The server."""

    path = "/sse"

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.seen: list[tuple[str, str]] = []
        """(HTTP method, path), in order."""
        self.posts: list[tuple[Any, Message]] = []
        """(headers, message) of every POST to a message endpoint, including refused ones."""
        self.endpoint: bytes | None = b"/messages?session=%d"
        self.get_status = 200
        self.post_sse_status = 405
        self.version = "2024-11-05"
        self.capabilities: dict[str, Any] = {"tools": {}}
        self.tools: list[dict[str, Any]] = []
        self.post: Callable[[Message], Awaitable[web.Response | None]] | None = None
        self.tool: Script | None = None
        self.instead: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] | None = None
        """If set, serves every request: another server at the same URL."""
        self._numbers = itertools.count()

    async def heard(self, method: str, count: int = 1) -> list[Message]:
        """Wait until that many messages of the method were accepted; "answer" is a response."""
        async with asyncio.timeout(DEADLINE):
            while (
                len(found := [m for s in self.streams for m in s.heard if m.get("method", "answer") == method]) < count
            ):
                await asyncio.sleep(0.002)
        return found

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        if self.instead is not None:
            return await self.instead(http)
        self.seen.append((http.method, http.path))
        if http.path == "/sse" and http.method == "GET":
            return await self._stream(http)
        if http.path.startswith("/messages"):
            return await self._message(http, json.loads(await http.read()))
        return web.Response(status=self.post_sse_status)

    async def _stream(self, http: web.BaseRequest) -> web.StreamResponse:
        if self.get_status != 200:
            return web.Response(status=self.get_status)
        stream = Stream(next(self._numbers), http.headers.copy())
        self.streams.append(stream)
        response = web.StreamResponse(headers=SSE)
        await response.prepare(http)
        try:
            if self.endpoint is not None:
                named = self.endpoint % stream.number if b"%d" in self.endpoint else self.endpoint
                await response.write(b"event: endpoint\ndata: %b\n\n" % named)
            while (data := await stream.out.get()) is not None:
                await response.write(data)
        finally:
            stream.closed.set()
        return response

    async def _message(self, http: web.BaseRequest, message: Message) -> web.StreamResponse:
        self.posts.append((http.headers.copy(), message))
        if self.post is not None and (refused := await self.post(message)) is not None:
            return refused
        stream = self.streams[int(http.query["session"])]
        stream.heard.append(message)
        method, id_ = message.get("method"), message.get("id")
        if method == "initialize":
            info = {"name": "fake-sse", "version": "1"}
            stream.say(
                id=id_, result={"protocolVersion": self.version, "capabilities": self.capabilities, "serverInfo": info}
            )
        elif method == "tools/call" and self.tool is not None:
            await self.tool(self, stream, message)
        elif method is not None and id_ is not None:
            result = (
                {"tools": self.tools} if method == "tools/list" else {"content": [{"type": "text", "text": "done"}]}
            )
            stream.say(id=id_, result=result)
        return web.Response(status=202)
