"""The reply to one request, on its way to the client or to the replica that forwarded the request.

A reply is one whole body, or an SSE stream that ends with the final message. The first message decides.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, Self

from multidict import CIMultiDict

from gateway.http.outbox import FinalMessage, Item, Outbox
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import JsonResponse, Response, StreamResponse, WholeResponse
from gateway.protocol import sse
from gateway.runtime.budget import Share
from gateway.runtime.pieces import Turn
from gateway.telemetry import Direction, Ending, bodies

_JSON: Final = "application/json"
_OK: Final = 200
Challenge = Callable[[HttpRequest, str], str]
"""Rewrites an upstream's WWW-Authenticate for the client of a request."""
SSE_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class ReplyWriter(ABC):
    """One reply on its way; exactly one `whole` or `end` finishes it."""

    started = False
    """Whether the reply has become a stream."""
    told: tuple[str | None, str | None] = None, None
    """The reason and the message of the error with which it ended. Not the error, whose traceback leads back here."""
    _is_one_stream = False

    @abstractmethod
    def share_unread(self) -> Share:
        """Return a share for what waits for the other side; if it must give way, the connection is closed."""

    async def start(self) -> None:
        """Make the reply a stream, which needs no head where nobody reads HTTP."""
        self.started = True

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send SSE bytes; raises ConnectionError when the other side does not read them."""

    async def end(self, ending: Ending) -> Response:
        """Complete the stream, which needs no end where nobody reads HTTP."""
        return WholeResponse(ending=ending)

    def as_one_stream(self) -> Self:
        """Have the reply become a stream only once, and return it.

        If the replica that wrote it dies, its client must come back with the newest event id that it got: another
        replica could only go on from the one in the request.
        """
        self._is_one_stream = True
        return self

    def orphaned(self) -> None:
        """The replica that wrote this reply will not end it; raises ConnectionError if no other one can."""
        if self._is_one_stream and self.started:
            self.break_off()

    def break_off(self) -> NoReturn:
        """Leave the stream without its end, so that its client opens it again; raises ConnectionResetError."""
        raise ConnectionResetError("this stream has to be opened again")

    async def whole(self, final: FinalMessage, event: bytes = b"") -> Response:
        """Send the final message; in a stream it is the last event, as `event` has it if that is given."""
        if final.cause is not None:
            self.told = final.cause.label, final.cause.message
        if self.started:
            await self.write(event or sse.encode(final.body))
            return await self.end(final.ending)
        response = await self.only(final)
        response.ending = final.ending
        return response

    def plain(self, body: bytes, ending: Ending) -> Response | None:  # noqa: ARG002  (for clients of HTTP)
        """The response with one body of status 200, if nothing has to be awaited for it; no other reply follows."""
        return None

    @abstractmethod
    async def only(self, final: FinalMessage) -> Response:
        """Send one body and nothing else."""

    async def deliver(
        self,
        outbox: Outbox,
        first: Awaitable[Item] | None = None,
        *,
        keeps_alive: bool = True,
        encode: Callable[[bytes], bytes] = bytes,
    ) -> FinalMessage:
        """Send each message as an event until the final one, which is returned; the first may come from `first`."""
        outbox.begin_writing(self.share_unread())
        turn: Turn | None = None
        try:
            item = await (first or outbox.take())
            while not isinstance(item, FinalMessage):
                if item is not None or keeps_alive:
                    if not self.started:
                        await self.start()
                    await self.write(sse.KEEP_ALIVE if item is None else encode(item))
                if outbox.is_ready:
                    turn = turn or Turn()
                    await turn.give_way()
                item = await outbox.take()
            return item
        finally:
            outbox.end_writing()

    async def finish(self, last: FinalMessage, event: bytes = b"") -> Response:
        """As `whole`, for a final message that may be empty: then a stream ends without one."""
        if last.body:
            return await self.whole(last, event)
        if not self.started:
            await self.start()
        return await self.end(last.ending)


class Discarded(ReplyWriter):
    """A reply that nobody reads."""

    def share_unread(self) -> Share:
        """See `ReplyWriter`; a reply of one small message needs none."""
        raise NotImplementedError

    async def write(self, data: bytes) -> None:
        """See `ReplyWriter`."""

    async def only(self, _: FinalMessage) -> Response:
        """See `ReplyWriter`."""
        return WholeResponse()


class MessageReply(ReplyWriter):
    """A reply whose reader is in this process, and takes each message on its own."""

    def __init__(self, event_bytes: int) -> None:
        self._parser = sse.Parser(2 * event_bytes)

    @abstractmethod
    async def take(self, message: bytes) -> None:
        """Take one message."""

    async def write(self, data: bytes) -> None:
        """Take the messages of a part of a stream."""
        for event in self._parser.feed(data):
            if event.data:
                await self.take(event.data)

    async def only(self, final: FinalMessage) -> Response:
        """Take the only message."""
        await self.take(final.body)
        return WholeResponse()


class HttpReply(ReplyWriter):
    """A reply that goes straight to the client."""

    status: int | None = None
    """That of a reply whose body is sent in parts, once its head is sent."""

    def __init__(self, http: HttpRequest, challenge: Challenge) -> None:
        self.http, self.started = http, False
        self._challenge = challenge
        self.stream: StreamResponse

    async def only(self, final: FinalMessage) -> Response:
        """Return one JSON body, which the connection writes."""
        body, status, headers = final.body, final.status, final.headers
        if "WWW-Authenticate" in headers:
            headers = CIMultiDict(headers)
            self.rewrite_challenges(headers)
        if bodies.on:
            self._show(body)
        if status == _OK and not headers and (usual := self.plain(body, final.ending)) is not None:
            return usual
        response = WholeResponse(body, status, headers)
        response.headers["Content-Type"] = _JSON
        return response

    def plain(self, body: bytes, ending: Ending) -> Response | None:
        """See `ReplyWriter`."""
        is_usual = not (self.started or bodies.on) and self.http.head.method == "POST"
        return JsonResponse(body, ending) if is_usual else None

    def share_unread(self) -> Share:
        """See `ReplyWriter`."""
        return self.http.wire.new_share()

    async def start(self) -> None:
        """Send the head of an SSE stream."""
        self.begin(StreamResponse(headers=SSE_HEADERS))
        self.started = True

    def begin(self, stream: StreamResponse) -> None:
        """Send the head of a reply whose body is sent in parts."""
        self.stream = stream
        stream.begin(self.http)
        self.status = stream.status

    async def write(self, data: bytes) -> None:
        """Send a part of an SSE stream."""
        if bodies.on and data != sse.KEEP_ALIVE:
            self._show(data.partition(b"data: ")[2].rstrip())
        await self.stream.write(data)

    async def end(self, ending: Ending) -> Response:
        """Send the end of the stream."""
        self.stream.ending = ending
        await self.stream.finish(self.http)
        return self.stream

    def break_off(self) -> NoReturn:
        """See `ReplyWriter`."""
        self.http.wire.end()
        super().break_off()

    def rewrite_challenges(self, headers: CIMultiDict[str]) -> None:
        """Point the client to the gateway for its sign-in."""
        values = headers.popall("WWW-Authenticate", ())
        headers.extend([("WWW-Authenticate", self._challenge(self.http, value)) for value in values])

    def _show(self, data: bytes) -> None:
        bodies.show(Direction.TO_CLIENT, data, route=self.http.head.path[:80], about={"request_id": self.http.id})
