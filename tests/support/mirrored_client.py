"""A legacy client of streamable HTTP whose every step the test takes."""

import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Self

import aiohttp

from gateway.protocol import mcp, sse
from tests.support import legacy_client

Json = dict[str, Any]
DEADLINE: Final = 10.0
CAPABILITIES: Final[Json] = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {"listChanged": True}}


class Stream(legacy_client.Stream):
    """One reply, read event by event; it may be one JSON body."""

    async def event(self) -> sse.Event:
        """The next event, priming ones too; raises EOFError at the end."""
        event = await super().event()
        if event is None:
            raise EOFError
        return event

    async def message(self) -> Json:
        """The next message."""
        if self.response.content_type == "application/json":
            found: Json = await self.response.json()
            return found
        return await super().message()

    async def place(self, count: int = 1) -> str:
        """The last event id after `count` events without a message have come."""
        for _ in range(count):
            event = await self.event()
            assert not event.data, event
        assert self.last
        return self.last


class LegacyClient:
    """One client; `url` may change from request to request."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        *,
        version: str = mcp.LEGACY,
        capabilities: Json = CAPABILITIES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.http, self.url = http, url
        self.version, self.capabilities = version, capabilities
        self.headers = dict(headers or {})
        self.session: str | None = None
        self._ids = itertools.count(1)

    @classmethod
    async def begun(cls, stand: legacy_client.Served, **options: Any) -> Self:
        """A client with a session at this gateway."""
        found = cls(stand.http, stand.url, **options)
        _ = await found.initialize()
        return found

    async def initialize(self) -> Json:
        info = {"name": "legacy", "version": "1"}
        params = {"protocolVersion": self.version, "capabilities": self.capabilities, "clientInfo": info}
        async with self.request("initialize", params) as stream:
            message = await stream.message()
            self.session = stream.response.headers.get(mcp.SESSION_ID)
        return message

    def sent(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        sent = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json", **self.headers}
        if self.session is not None:
            sent |= {mcp.SESSION_ID: self.session, mcp.PROTOCOL_VERSION: self.version}
        return {**sent, **(extra or {})}

    @asynccontextmanager
    async def post(self, message: Any, url: str | None = None, **headers: str) -> AsyncIterator[Stream]:
        sent = self.sent(headers)
        async with self.http.post(url or self.url, headers=sent, data=json.dumps(message)) as response:
            yield Stream(response)

    @asynccontextmanager
    async def request(
        self, method: str, params: Json | None = None, url: str | None = None, id_: Any = None
    ) -> AsyncIterator[Stream]:
        id_ = next(self._ids) if id_ is None else id_
        message = {"jsonrpc": "2.0", "id": id_, "method": method, "params": params or {}}
        async with self.post(message, url) as stream:
            yield stream

    @asynccontextmanager
    async def get(self, last_id: str | None = None, url: str | None = None) -> AsyncIterator[Stream]:
        extra = {} if last_id is None else {mcp.LAST_EVENT_ID: last_id}
        sent = self.sent(extra)
        del sent["Content-Type"]
        async with self.http.get(url or self.url, headers=sent) as response:
            yield Stream(response)

    @asynccontextmanager
    async def call(self, name: str, arguments: Json | None = None, url: str | None = None) -> AsyncIterator[Stream]:
        async with self.request("tools/call", {"name": name, "arguments": arguments or {}}, url) as stream:
            yield stream

    async def ask(self, method: str, params: Json | None = None) -> Json:
        """One request with one message in reply."""
        async with self.request(method, params) as stream:
            return await stream.message()

    async def answer(self, question: Json, result: Any, url: str | None = None) -> int:
        """Answer a nested request; return the HTTP status."""
        async with self.post({"jsonrpc": "2.0", "id": question["id"], "result": result}, url) as stream:
            return stream.response.status

    async def notify(self, method: str, params: Json | None = None, url: str | None = None) -> int:
        async with self.post({"jsonrpc": "2.0", "method": method, "params": params or {}}, url) as stream:
            return stream.response.status
