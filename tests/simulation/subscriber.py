"""SIMULATED clients that listen to changes: modern ones with `subscriptions/listen`, legacy ones with a GET stream."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.protocol import mcp
from tests.simulation import plain_http as http
from tests.simulation.client import Player, meta_of, modern_request
from tests.simulation.listening import CHANGE, Listener

_PAUSE_SECONDS: Final = 0.5
_SILENT_SECONDS: Final = 40.0
"""A stream without even a comment for so long is dead: the gateway sends one every 15 s."""
SESSION_LOST: Final = ("HTTP 404", "HTTP 405")
_ANSWER_SECONDS: Final = 60.0


@dataclass
class Heard:
    """One announcement that a client got."""

    at: float
    method: str
    uri: str
    number: int | None
    """The number of the change; None if the gateway says that anything may have changed."""


@dataclass
class Stream:
    """One stream of a listener, from its request to its end."""

    began: float
    used: set[int]
    ended: float | None = None
    how: str = ""
    """How it ended: result, broken, silent, left; or how it was refused."""
    promised: float | None = None
    """From this time on, every change is to be heard."""
    offered: set[tuple[str, str]] = field(default_factory=set)


@dataclass
class Listened:
    """What one listener has seen."""

    listener: Listener
    began: float = 0.0
    ended: float | None = None
    streams: list[Stream] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    promised: dict[tuple[str, str], float] = field(default_factory=dict)
    """From when on a legacy client hears of each topic, over all its streams."""
    sure: float | None = None
    """When it had subscribed to everything."""
    has_ended_session: bool = True
    """Whether the gateway has accepted the end of its session, if it had one."""
    strange: list[str] = field(default_factory=list)


class Subscriber(Player):
    """Listens with one stream after another until its time is over."""

    def __init__(self, listener: Listener, addresses: list[tuple[str, int]], record: Listened) -> None:
        super().__init__(listener, addresses)
        self._listener, self.record = listener, record
        self._until = 0.0

    async def play(self) -> None:
        """Listen until the end."""
        self._until = self._now() + self._listener.until
        await super().play()

    async def _play(self) -> None:
        while self._now() < self._until and not self._has_lost_session():
            await self._listen()
            await asyncio.sleep(_PAUSE_SECONDS)

    def _has_lost_session(self) -> bool:
        return False

    async def _listen(self) -> None:
        """Have one stream, to its end."""
        replica = self._replica()
        stream = Stream(self._now(), {replica})
        self.record.streams.append(stream)
        try:
            async with asyncio.timeout_at(self._until):
                stream.how = await self._read(replica, stream)
        except TimeoutError:
            stream.how = "left"
        except (OSError, http.Broken):
            stream.how = stream.how or "broken"
        finally:
            stream.ended = self._now()

    async def _read(self, replica: int, stream: Stream) -> str:
        self._ids += 1
        id_ = f"{self._listener.tag}-{self._ids}"
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                reply = await self._open(replica, id_)
        except TimeoutError as exc:
            stream.how = "silent"
            raise http.Broken("no reply") from exc
        try:
            if not reply.headers.get("content-type", "").startswith("text/event-stream"):
                body = await reply.body()
                return f"HTTP {reply.status} {body.decode(errors='replace')}"
            with self._watched(reply, stream):
                async for event, message in reply.events():
                    if message is None:
                        self._passed(event)
                    elif self._take(stream, id_, event, message):
                        return "result"
            return self._at_end()
        finally:
            reply.close()

    @contextmanager
    def _watched(self, reply: http.Reply, stream: Stream) -> Iterator[None]:
        """Close a stream that says nothing any more."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            nonlocal timer
            if loop.time() - reply.heard > _SILENT_SECONDS:
                stream.how = "silent"
                reply.close()
            else:
                timer = loop.call_later(5.0, look)

        timer = loop.call_later(5.0, look)
        try:
            yield
        finally:
            timer.cancel()

    async def _open(self, replica: int, id_: str) -> http.Reply:
        listener = self._listener
        chosen = {"toolsListChanged": listener.wants_lists, "resourceSubscriptions": list(listener.uris)}
        params = {"notifications": chosen, "_meta": meta_of("listener", {})}
        return await self._send_to(replica, "POST", *modern_request(listener, id_, mcp.LISTEN, params))

    def _take(self, stream: Stream, id_: str, event: str | None, message: Any) -> bool:
        """Take one message; returns whether it is the result."""
        method = message.get("method")
        if method is None:
            if message.get("id") != id_ or message.get("result", {}).get("resultType") != "complete":
                self.record.strange.append(f"{id_} ended with {message}")
            return True
        params = message["params"]
        if params.get("_meta", {}).get(mcp.META_SUBSCRIPTION) != id_:
            self.record.strange.append(f"{id_} got {message}")
        if method == mcp.ACKNOWLEDGED:
            if stream.promised is not None:
                self.record.strange.append(f"{id_} was acknowledged twice")
            found = params["notifications"]
            stream.promised = self._now()
            stream.offered |= {(mcp.TOOLS_CHANGED, "")} if found.get("toolsListChanged") else set()
            stream.offered |= {(mcp.RESOURCE_UPDATED, uri) for uri in found.get("resourceSubscriptions", ())}
        else:
            if stream.promised is None:
                self.record.strange.append(f"{id_} got {method} before it was acknowledged")
            self._note(method, params)
        return False

    def _note(self, method: str, params: Any) -> None:
        number = (params.get("_meta") or {}).get(CHANGE)
        self.record.heard.append(Heard(self._now(), method, params.get("uri", ""), number))

    def _passed(self, event: str | None) -> None:
        """An event without data has come."""

    def _at_end(self) -> str:
        """The stream has ended without a result."""
        return "broken"


class LegacySubscriber(Subscriber):
    """A legacy client, whose GET stream goes on at another replica when it breaks."""

    _last: str | None = None

    async def _play(self) -> None:
        try:
            async with asyncio.timeout_at(self._until):
                await self._begin_session()
        except TimeoutError:
            return
        loop = http.running_loop()
        subscribing = loop.create_task(self._subscribe())
        loop.process.keep(subscribing)
        await super()._play()
        subscribing.cancel()
        self.record.has_ended_session = False
        with suppress(OSError, TimeoutError, http.Broken):
            async with asyncio.timeout(_ANSWER_SECONDS):
                reply = await self._send_to(self._replica(), "DELETE", self._legacy_headers())
            reply.close()
            self.record.has_ended_session = reply.status == 200

    def _has_lost_session(self) -> bool:
        """Whether the gateway does not know its session any more, or has no stream for it."""
        streams = self.record.streams
        return bool(streams) and streams[-1].how.startswith(SESSION_LOST)

    async def _begin_session(self) -> None:
        while not self._session:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    (await self._initialize({})).close()
            except (OSError, http.Broken):
                await asyncio.sleep(_PAUSE_SECONDS)
        with suppress(OSError, http.Broken):
            (await self._send({"method": "notifications/initialized"})).close()

    async def _subscribe(self) -> None:
        """Once there is a stream, subscribe to each resource until that is accepted."""
        record, listener = self.record, self._listener
        while not any(stream.promised is not None for stream in record.streams):
            await asyncio.sleep(0.05)
        if listener.wants_lists:
            record.promised[mcp.TOOLS_CHANGED, ""] = self._now()
        for uri in listener.uris:
            is_done = False
            while not is_done:
                self._ids += 1
                message = {"id": self._ids, "method": mcp.SUBSCRIBE, "params": {"uri": uri}}
                try:
                    reply = await self._send(message)
                    try:
                        is_done = "result" in msgspec.json.decode(await reply.body())
                    finally:
                        reply.close()
                except (OSError, http.Broken):
                    is_done = False
                if not is_done:
                    await asyncio.sleep(_PAUSE_SECONDS)
            record.promised[mcp.RESOURCE_UPDATED, uri] = self._now()
        record.sure = self._now()

    async def _send(self, message: dict[str, Any]) -> http.Reply:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await self._send_legacy(message)

    async def _open(self, replica: int, id_: str) -> http.Reply:
        headers = {**self._legacy_headers(), "Accept": "text/event-stream"}
        if self._last is not None:
            headers["Last-Event-ID"] = self._last
        reply = await self._send_to(replica, "GET", headers)
        if reply.status == 200:
            self.record.streams[-1].promised = self._now()
        return reply

    def _take(self, stream: Stream, id_: str, event: str | None, message: Any) -> bool:
        self._passed(event)
        if "method" not in message:
            self.record.strange.append(f"got {message}")
            return False
        self._note(message["method"], message.get("params") or {})
        return False

    def _passed(self, event: str | None) -> None:
        self._last = event or self._last

    def _at_end(self) -> str:
        return "ended"
