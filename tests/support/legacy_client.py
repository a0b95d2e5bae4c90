"""Plain legacy clients over streamable HTTP and HTTP+SSE, message by message."""

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Awaitable, Generator, Mapping
from typing import Any, Final, NamedTuple, Protocol, Self

import aiohttp

from gateway.protocol import mcp, sse
from tests.support.fake_upstream import DEADLINE

Json = dict[str, Any]
ANSWER = {"action": "accept", "content": {"name": "Ada"}}
CAPABILITIES: Final[Json] = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {"listChanged": True}}


class Served(Protocol):
    """What a client calls: a gateway in this process or another, or whatever stands before several."""

    @property
    def http(self) -> aiohttp.ClientSession: ...
    @property
    def url(self) -> str: ...


class Address(NamedTuple):
    """An address, with the connections of its client."""

    http: aiohttp.ClientSession
    url: str


class Stream:
    """One reply, read event by event; it may be one JSON body."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.status = response.status
        self._parser = sse.Parser(1 << 26)
        self._events: deque[sse.Event] = deque()
        self.last = ""
        """The last event id."""

    async def event(self) -> sse.Event | None:
        """The next event, priming ones included; None at the end."""
        async with asyncio.timeout(DEADLINE):
            while not self._events:
                try:
                    chunk = await self.response.content.readany()
                except aiohttp.ClientError:
                    self.response.close()
                    raise
                if not chunk:
                    return None
                self._events.extend(self._parser.feed(chunk))
        event = self._events.popleft()
        self.last = event.id or self.last
        return event

    async def message(self) -> Json:
        """The next message; raises EOFError at the end."""
        if self.response.content_type == "application/json":
            body: Json = await self.response.json()
            return body
        while (event := await self.event()) is not None:
            if event.data:
                message: Json = json.loads(event.data)
                return message
        raise EOFError

    async def rest(self) -> list[Json]:
        """All messages until the end."""
        messages: list[Json] = []
        while (event := await self.event()) is not None:
            if event.data:
                messages.append(json.loads(event.data))
        return messages

    async def place(self, count: int = 1) -> str:
        """The last event id after `count` events without a message have come."""
        for _ in range(count):
            event = await self.event()
            assert event is not None
            assert not event.data, event
        assert self.last
        return self.last

    def close(self) -> None:
        """Break the connection."""
        self.response.close()


class Opening:
    """A reply that comes: awaited, it is read by the test; entered, it is closed at the end of the block."""

    def __init__(self, reply: Awaitable[aiohttp.ClientResponse]) -> None:
        self._reply = reply

    async def _opened(self) -> Stream:
        async with asyncio.timeout(DEADLINE):
            self._stream = Stream(await self._reply)
        return self._stream

    def __await__(self) -> Generator[Any, None, Stream]:
        return self._opened().__await__()

    async def __aenter__(self) -> Stream:
        return await self._opened()

    async def __aexit__(self, *_: object) -> None:
        self._stream.close()


class LegacyClient:
    """One session over streamable HTTP; `url` may change from request to request."""

    def __init__(
        self,
        stand: Served,
        version: str = mcp.LEGACY,
        authorization: str | None = None,
        url: str | None = None,
        capabilities: Json | None = CAPABILITIES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.http = stand.http
        self.url = url or stand.url
        self.version, self.capabilities = version, capabilities
        self.headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        if authorization is not None:
            self.headers["Authorization"] = authorization
        self.headers.update(headers or {})
        self.ids = itertools.count(1)

    async def initialize(self) -> Self:
        """Begin the session."""
        status, headers, (answer,) = await self.post(self.begin_message())
        assert status == 200, answer
        assert answer["result"]["protocolVersion"], answer
        self.headers[mcp.SESSION_ID] = headers[mcp.SESSION_ID]
        self.headers[mcp.PROTOCOL_VERSION] = self.version
        assert await self.notify(mcp.INITIALIZED) == 202
        return self

    def begin_message(self) -> Json:
        info = {"name": "old", "version": "1"}
        params = {"protocolVersion": self.version, "capabilities": self.capabilities, "clientInfo": info}
        return {"id": 0, "method": mcp.INITIALIZE, "params": params}

    def open(self, message: Json | bytes, url: str | None = None) -> Opening:
        """POST a message."""
        body = message if isinstance(message, bytes) else json.dumps({"jsonrpc": "2.0", **message}).encode()
        return Opening(self.http.post(url or self.url, data=body, headers=self.headers))

    async def post(self, message: Json | bytes, url: str | None = None) -> tuple[int, Any, list[Json]]:
        """POST a message and read the whole reply: its status, headers and messages."""
        stream = await self.open(message, url)
        response = stream.response
        if response.content_type == "text/event-stream":
            return response.status, response.headers, await stream.rest()
        body = await response.read()
        return response.status, response.headers, [json.loads(body)] if body else []

    def request(self, method: str, params: Json | None = None, url: str | None = None, id_: Any = None) -> Opening:
        id_ = next(self.ids) if id_ is None else id_
        return self.open({"id": id_, "method": method, "params": params or {}}, url)

    async def ask(self, method: str, params: Json | None = None) -> Json:
        """One request with one message in reply."""
        async with self.request(method, params) as stream:
            return await stream.message()

    def call(self, name: str = "tool", arguments: Json | None = None, url: str | None = None) -> Opening:
        return self.open(self.call_message(name, arguments), url)

    def call_message(self, name: str = "tool", arguments: Any = None, **meta: Any) -> Json:
        params: Json = {"name": name, "arguments": arguments or {}}
        if meta:
            params["_meta"] = meta
        return {"id": next(self.ids), "method": mcp.TOOLS_CALL, "params": params}

    async def answer(self, asked: Json, result: Any = None, url: str | None = None) -> int:
        """Answer a nested request; return the status."""
        return (await self.post({"id": asked["id"], "result": ANSWER if result is None else result}, url))[0]

    async def notify(self, method: str, params: Json | None = None, url: str | None = None) -> int:
        """Send a notification; return the status."""
        return (await self.post({"method": method, "params": params or {}}, url))[0]

    def listen(self, last: str | None = None, url: str | None = None) -> Opening:
        """GET a stream: the standalone one, or the one that an event id names."""
        headers = self.headers | ({} if last is None else {mcp.LAST_EVENT_ID: last})
        return Opening(self.http.get(url or self.url, headers=headers))

    async def end(self) -> int:
        """DELETE the session."""
        async with asyncio.timeout(DEADLINE), self.http.delete(self.url, headers=self.headers) as response:
            return response.status


class SseClient(LegacyClient):
    """One session over HTTP+SSE."""

    stream: Stream

    async def connect(self) -> Self:
        """Open the stream, and learn the address for messages."""
        async with asyncio.timeout(DEADLINE):
            self.stream = Stream(
                await self.http.get(self.url, headers={**self.headers, "Accept": "text/event-stream"})
            )
        assert self.stream.status == 200
        event = await self.stream.event()
        assert event is not None
        assert event.event == "endpoint"
        self.url = f"http://{self.url.split('/')[2]}{event.data.decode()}"
        return self

    async def initialize(self) -> Self:
        """Begin the session."""
        await self.connect()
        assert (await self.post(self.begin_message()))[0] == 202
        assert (await self.stream.message())["id"] == 0
        assert await self.notify(mcp.INITIALIZED) == 202
        return self
