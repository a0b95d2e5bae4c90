"""Plain HTTP/1.1 for the simulated servers and clients: enough for MCP, and no more."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec

from tests.simulation.kernel import Loop

Headers = dict[str, str]
_STATUS: Final = {
    200: "OK",
    202: "Accepted",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


class Request:
    """One request, and its reply."""

    def __init__(self, method: str, path: str, headers: Headers, body: bytes, out: "ServerConnection") -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self._out = out
        self.is_streaming = False
        self.is_done = False
        self.gone = asyncio.get_running_loop().create_future()
        """Done when the client has closed the connection before the reply was complete."""

    def reply(self, status: int, body: bytes = b"", headers: Headers | None = None) -> None:
        """Send a whole reply."""
        kind = {"Content-Type": "application/json"} if body else {}
        head = _head(status, {**kind, **(headers or {}), "Content-Length": str(len(body))})
        self._out.write(head + body)
        self._end()

    @property
    def is_reply_lost(self) -> bool:
        """Whether something between the hosts broke the connection before its client had read the whole reply."""
        return self._out.has_lost_reply_to(self)

    def reply_json(self, message: object, headers: Headers | None = None) -> None:
        self.reply(200, msgspec.json.encode(message), headers)

    def stream(self, headers: Headers | None = None) -> None:
        """Begin an event stream."""
        self.is_streaming = True
        sse = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "Transfer-Encoding": "chunked"}
        self._out.write(_head(200, {**sse, **(headers or {})}))

    def event(self, message: object, id_: str | None = None) -> bool:
        """Send one event; False if nobody reads it any more."""
        if self.is_done or self.gone.done():
            return False
        data = b"" if id_ is None else b"id: %b\n" % id_.encode()
        data += b"data: %b\n\n" % msgspec.json.encode(message) if message is not None else b"data: \n\n"
        self._out.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def end(self) -> None:
        """End an event stream."""
        if not self.is_done and not self.gone.done():
            self._out.write(b"0\r\n\r\n")
            self._end()

    def cut(self) -> None:
        """Break the connection."""
        self._out.abort()

    def _end(self) -> None:
        self.is_done = True
        self._out.served()


def _head(status: int, headers: Headers) -> bytes:
    return _head_of(f"HTTP/1.1 {status} {_STATUS.get(status, 'Status')}", headers)


def _head_of(first: str, headers: Headers) -> bytes:
    return "\r\n".join([first, *[f"{name}: {value}" for name, value in headers.items()], "\r\n"]).encode()


def _headers(fields: list[str]) -> Headers:
    return dict(map(_header, fields))


@lru_cache(maxsize=4096)
def _header(field: str) -> tuple[str, str]:
    """Most come again and again."""
    name, _, value = field.partition(":")
    return name.lower(), value.strip()


def first_request(data: bytes) -> tuple[str, str, Headers, bytes, bytes] | None:
    """Method, path, headers and body of a connection's first request, and what follows it; None until it is here."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None
    line, *fields = head.decode().split("\r\n")
    method, path, _ = line.split(" ")
    headers = _headers(fields)
    length = int(headers.get("content-length", 0))
    return (method, path, headers, rest[:length], rest[length:]) if len(rest) >= length else None


class ServerConnection(asyncio.Protocol):
    """One connection of a simulated server."""

    def __init__(self, serve: Callable[[Request], Coroutine[Any, Any, None]], idle_seconds: float) -> None:
        self._serve = serve
        self._idle_seconds = idle_seconds
        self._transport: Any = None
        self._data = b""
        self._now: Request | None = None
        self._newest: Request | None = None
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._be_idle()

    def _be_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(self._idle_seconds, self._close_idle)

    def _close_idle(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._next()

    def _next(self) -> None:
        if not self._data or self._now is not None or self._transport.is_closing():
            return
        found = first_request(self._data)
        if found is None:
            return
        method, path, headers, body, self._data = found
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        request = self._now = self._newest = Request(method, path, headers, body, self)
        loop = running_loop()
        loop.process.keep(loop.create_task(self._serve(request)))

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def has_lost_reply_to(self, request: Request) -> bool:
        is_cut: bool = self._newest is request and self._transport.is_cut
        return is_cut and (request.gone.done() or not self._transport.is_read)

    def served(self) -> None:
        """The reply is complete."""
        self._now = None
        if not self._transport.is_closing():
            self._be_idle()
            asyncio.get_running_loop().call_soon(self._next)

    def abort(self) -> None:
        self._transport.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, _: Exception | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._now is not None and not self._now.gone.done():
            self._now.gone.set_result(None)


async def serve(
    host: str, port: int, handler: Callable[[Request], Coroutine[Any, Any, None]], idle_seconds: float = 60.0
) -> Any:
    """Listen, in the process that runs."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: ServerConnection(handler, idle_seconds), host, port)


class Broken(Exception):
    """There is no complete reply."""


class ClientConnection(asyncio.Protocol):
    """What comes on one connection of a client, to be read as from `asyncio.StreamReader`, at half the cost."""

    transport: Any

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._data = b""
        self._is_ended = False
        self._lost: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._wake(None)

    def eof_received(self) -> bool:
        self._is_ended = True
        self._wake(None)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_ended, self._lost = True, exc
        self._wake(exc)

    def _wake(self, exc: Exception | None) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if exc is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(exc)

    async def read(self, count: int) -> bytes:
        """So many bytes. Raises Broken, or OSError."""
        self._check()
        while len(self._data) < count:
            await self._more()
        data, self._data = self._data[:count], self._data[count:]
        return data

    async def read_to(self, end: bytes) -> bytes:
        """What comes before this end. Raises Broken, or OSError."""
        self._check()
        while end not in self._data:
            await self._more()
        data, _, self._data = self._data.partition(end)
        return data

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _more(self) -> None:
        if self._is_ended:
            raise Broken("the connection has ended")
        self._waiter = self._loop.create_future()
        await self._waiter


class Reply:
    """The reply to a client's request."""

    def __init__(self, status: int, headers: Headers, connection: ClientConnection) -> None:
        self.status, self.headers = status, headers
        self._connection = connection
        self.is_complete = False
        self.heard = asyncio.get_running_loop().time()
        """When a part of its stream came last."""

    async def body(self) -> bytes:
        """The whole body. Raises Broken."""
        try:
            if "content-length" in self.headers:
                data = await self._connection.read(int(self.headers["content-length"]))
            else:
                data = b"".join([part async for part in self._chunks()])
        except (OSError, ValueError) as exc:
            raise Broken("the reply is cut") from exc
        self.is_complete = True
        return data

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int((await self._connection.read_to(b"\r\n")).split(b";")[0], 16)
            data = await self._connection.read(size + 2)
            self.heard = running_loop().time()
            if not size:
                return
            yield data[:-2]

    async def events(self) -> AsyncIterator[tuple[str | None, Any]]:
        """Each event: its id, its message. Raises Broken."""
        buffer = b""
        try:
            async for part in self._chunks():
                buffer += part.replace(b"\r\n", b"\n")
                while b"\n\n" in buffer:
                    block, _, buffer = buffer.partition(b"\n\n")
                    id_, data = None, b""
                    for line in block.split(b"\n"):
                        if line.startswith(b"id:"):
                            id_ = line[3:].strip().decode()
                        elif line.startswith(b"data:"):
                            data += line[5:].strip()
                    if id_ is not None or data:
                        yield id_, msgspec.json.decode(data) if data else None
        except (OSError, ValueError) as exc:
            raise Broken("the stream is cut") from exc
        self.is_complete = True

    async def pause(self, pause: "Pause") -> None:
        """Read nothing more for a while. Raises Broken if the client leaves then."""
        await _read_nothing(self._connection.transport, pause)

    def close(self) -> None:
        """Close the connection."""
        if self.is_complete:
            self._connection.transport.close()
        else:
            self._connection.transport.abort()


@dataclass(frozen=True)
class Pause:
    """How long a client reads nothing of a reply, and whether it leaves after that."""

    seconds: float
    leaves: bool = False


async def request(
    address: tuple[str, int],
    method: str,
    path: str,
    headers: Headers,
    body: bytes = b"",
    *,
    seconds: float = 10.0,
    pause: Pause | None = None,
) -> Reply:
    """Send a request on a connection of its own; return the head of the reply. Raises Broken, or OSError if unsent."""
    async with asyncio.timeout(seconds):
        transport, connection = await running_loop().create_connection(ClientConnection, *address)
    fields = {"Host": f"{address[0]}:{address[1]}", **headers, "Content-Length": str(len(body))}
    try:
        transport.write(_head_of(f"{method} {path} HTTP/1.1", fields) + body)
        if pause is not None:
            await _read_nothing(transport, pause)
        head = await connection.read_to(b"\r\n\r\n")
    except OSError as exc:
        transport.abort()
        raise Broken("no reply") from exc
    except BaseException:
        transport.abort()
        raise
    first, *lines = head.decode().split("\r\n")
    return Reply(int(first.split(" ")[1]), _headers(lines), connection)


async def _read_nothing(transport: Any, pause: Pause) -> None:
    transport.stop_reading()
    await asyncio.sleep(pause.seconds)
    if pause.leaves:
        raise Broken("the client has left")
    transport.read_on()


def running_loop() -> Loop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    return loop
