"""One connection to an upstream, which carries one request after another, and a request in flight.

Rule 1: a connection is used again only if its last reply was complete, and neither side has anything left to say in
it. Whatever else comes, it is closed: what remains would be taken for the next reply.
Rule 2: the listener is called from `data_received`. It may abort the request or pause its reply in every method. Once
the reply is complete, the connection is ready for another request before the listener hears of it.
Rule 3: no upstream holds the event loop: what takes long to parse is parsed in several turns (`runtime.pieces`).
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, Protocol, cast

import msgspec

from gateway import world
from gateway.http_client.errors import ListenerFailed, MalformedReply, NoReply, ReplyCut, RequestFailed, TlsRefused
from gateway.http_client.familiar_heads import FamiliarHeads
from gateway.http_client.origin import Origin
from gateway.http_client.reply_head import CONTINUE, ReplyHead
from gateway.http_client.reply_listener import ReplyListener
from gateway.http_client.reply_parser import Ending, Reader, ReplyParser, Rest, SizedRest, UnsizedRest
from gateway.http_client.tls_errors import handshake_cause, is_ended_properly, refuses_certificate
from gateway.runtime.pieces import PIECE_BYTES, Pieces
from gateway.runtime.tasks import Tasks

_EVENTS: Final = "text/event-stream"
_PART_BYTES: Final = 131_072
"""A larger body of a request is written in parts of this size, so that no more of it is copied into buffers."""
IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
"""Methods that may run twice (RFC 9110 section 9.2.2)."""
Sending = Literal["usual", "repeatable", "fresh", "again"]
"""How a request is sent: as its method allows; as one that may run twice, whatever its method; on a new connection and
only once; or after another connection has carried it."""
_FEW_LINES: Final = 64
"""A part of an event stream that has fewer is cheap to read, whatever its size."""


class Owner(Protocol):
    """The client that a connection belongs to."""

    tasks: Tasks
    """Reports what the last method of a listener raises."""

    def connect(self, pending: "PendingRequest") -> None:
        """Send a request once more whose connection has ended without a byte of a reply."""

    def freed(self, connection: "Connection") -> None:
        """The connection can carry another request."""

    def ended_idle(self, connection: "Connection") -> None:
        """The upstream has ended the connection, which carried no request."""

    def closed(self, connection: "Connection") -> None:
        """The connection has ended."""


class PendingRequest(msgspec.Struct, eq=False):
    """One request. All methods but `distrust` do nothing once its reply has ended."""

    origin: Origin
    listener: ReplyListener
    """Until the request is over."""
    head: bytes = b""
    body: bytes = b""
    """Both until they need not be sent any more."""
    connect_seconds: float = 0.0
    method: str = "POST"
    is_lenient: bool = False
    """Whether the values of the reply's headers may have control characters, which the listener then removes."""
    sending: Sending = "usual"
    """How it is sent next."""
    awaits_continue: bool = False
    """Whether the body is not sent yet: the server has not said `100 Continue`, for which the head has to ask."""
    stage: Literal["in flight", "read", "over"] = "in flight"
    """Read: the listener hears the last part of the reply. Over: it has heard, or must hear, nothing more."""
    is_paused: bool = False
    carrier: "Connection | asyncio.Task[None] | None" = None
    """The task that opens a connection for it, then the connection that it is, or was, sent on."""
    _closing: asyncio.TimerHandle | None = None
    """When the rest of the reply is given up."""

    def abort(self) -> None:
        """Give the request up. Its connection is closed, because the rest of the reply would come on it."""
        if self.stage == "over":
            return
        carrier, self.carrier = self.carrier, None
        _ = self.end()
        if isinstance(carrier, Connection):
            carrier.abort()
        elif carrier is not None:
            carrier.cancel()

    def pause_reading(self) -> None:
        """Stop the reply until `resume_reading`. What was read from the socket before is still handed over.

        Without reading, the end of the connection is not noticed either.
        """
        if self.stage != "over" and not self.is_paused:
            self.is_paused = True
            if isinstance(self.carrier, Connection):
                self.carrier.pause_reading()

    def resume_reading(self) -> None:
        """Go on with the reply."""
        if self.stage != "over" and self.is_paused:
            self.is_paused = False
            if isinstance(self.carrier, Connection):
                self.carrier.resume_reading()

    def end_within(self, seconds: float) -> None:
        """Read the rest of the reply, so that its connection can be used again, but give it up after this time.

        Many servers keep a stream open after their response.
        """
        if self.stage != "in flight" or self._closing is not None:
            return
        self.resume_reading()
        self._closing = asyncio.get_running_loop().call_later(seconds, self.abort)

    def distrust(self) -> None:
        """Use the connection for no further request, even if the reply is complete.

        What came on it was not the response to this request, so the next response may be that of another one too.
        """
        if isinstance(self.carrier, Connection):
            self.carrier.distrust()
            self.carrier = None

    @property
    def is_connecting(self) -> bool:
        """Whether the request still waits for its connection."""
        return isinstance(self.carrier, asyncio.Task)

    # -- for the client and the connection ----------------------------------------------------------------------

    def waits_for(self, task: asyncio.Task[None]) -> None:
        """A task opens a connection for the request."""
        self.carrier = task

    def sent_on(self, connection: "Connection") -> None:
        """It is sent on this connection, and may be in flight for long."""
        if self.sending in ("fresh", "again") or (self.sending == "usual" and self.method not in IDEMPOTENT):
            self.head = self.body = b""  # this is the last time
        self.carrier, self.sending = connection, "again"

    def continued(self) -> None:
        """The server has asked for the body."""
        self.awaits_continue = False

    def heard(self) -> None:
        """A byte of the reply is here, so the request will not be sent again."""
        self.head = self.body = b""

    def fail(self, failure: RequestFailed, owner: Owner) -> None:
        """Tell the listener why its reply will not be completed, or come at all."""
        if self.stage == "over":
            return
        listener = self.end()
        try:
            listener.on_failed(failure)
        except Exception as exc:  # noqa: BLE001 - the outermost edge of a callback
            owner.tasks.failed("upstream reply", exc)

    def end(self) -> ReplyListener:
        """Let go of all but the connection; return the listener, which hears no more than one last word."""
        self.stage = "over"
        if self.head:
            self.heard()
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        listener = self.listener
        del self.listener  # it often refers to this handle
        return listener


class _NoTransport(asyncio.Transport):
    """Stands for the transport of a connection that is not open."""

    def is_closing(self) -> bool:
        """See `asyncio.Transport`."""
        return True

    def abort(self) -> None:
        """See `asyncio.Transport`."""


_NOT_OPEN: Final = _NoTransport()


@dataclass(slots=True, eq=False)
class _Unsent:
    """The rest of a request's body that is not written at once."""

    rest: bytes | memoryview
    is_paused: bool = False
    """Whether the upstream does not read as fast as it is written."""


@dataclass(slots=True, eq=False, repr=False)
class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    origin: Origin
    _owner: Owner
    _familiar: FamiliarHeads
    """Shared by the connections to one server."""
    keep_alive_seconds: int | None = None
    """How long the upstream keeps the connection open, if its last reply says so."""
    _transport: asyncio.Transport = _NOT_OPEN
    _poll: Callable[[], object] | None = None
    """Made when the connection is used again."""
    _pending: PendingRequest | None = None
    """The request in flight."""
    _reader: FamiliarHeads | Reader = field(init=False)
    """What reads on in the reply: its beginning is read by the familiar heads."""
    _use: Literal["first", "again", "last"] = "first"
    """Whether a request was sent before, and whether no further one must be sent."""
    _pieces: Pieces | None = None
    """While a packet of more than one piece is parsed."""
    _unsent: _Unsent | None = None

    def __post_init__(self) -> None:
        self._reader = self._familiar

    # -- for the client -----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as the event loop knows, and carries no request."""
        return self._pending is None and not self._transport.is_closing()

    def is_usable(self) -> bool:
        """Whether it is open and nothing lies in its socket, such as its end: the event loop looks there later."""
        if self._pending is not None or self._transport.is_closing():
            return False
        poll = self._poll
        if poll is None:
            poll = self._poll = world.poll(self._transport.get_extra_info("socket"))
        return not poll()

    def start(self, pending: PendingRequest) -> None:
        """Send a request on an open connection."""
        head, body = pending.head, pending.body
        pending.sent_on(self)
        self._pending = pending
        if pending.is_paused:
            self._transport.pause_reading()
        if len(body) <= _PART_BYTES and not pending.awaits_continue:
            self._transport.write(head + body if body else head)
            return
        self._unsent = _Unsent(body if len(body) <= _PART_BYTES else memoryview(body))
        self._transport.write(head)
        self._send_more()

    def close(self, failure: RequestFailed) -> None:
        """Close the connection. If it carries a request, tell the listener why its reply will not be completed."""
        pending = self._pending
        self.abort()
        if pending is None:
            return
        if isinstance(failure, NoReply) and pending.head:
            # The upstream may have closed a connection that was idle, and so may it the other idle ones. It may also
            # have closed a new one, if this process stood still before it used that.
            self._owner.connect(pending)
            return
        pending.fail(failure, self._owner)

    # -- for the request in flight ------------------------------------------------------------------------------

    def abort(self) -> None:
        """Close the connection at once, without a word to the listener."""
        if isinstance(self._reader, ReplyParser):
            self._reader.release()
        self._reader = self._familiar
        self._pending = self._unsent = None
        self._transport.abort()  # a close would first wait until the rest of the request is sent
        if self._pieces is not None:
            self._pieces.drop()

    def pause_reading(self) -> None:
        """Read nothing more from the socket."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again, unless what was read from it waits to be parsed."""
        if self._transport.is_closing():
            return
        if self._pieces is None or not self._pieces.is_waiting:
            self._transport.resume_reading()

    def distrust(self) -> None:
        """Carry no further request: one that has begun already is the last."""
        if self._pending is None:
            self.abort()
        else:
            self._use = "last"

    # -- from the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open, TLS included."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have other bases

    def data_received(self, data: bytes) -> None:
        """Parse what was read; the parser calls the methods of the listener."""
        if self._pieces is not None:
            self._pieces.take(data)
        elif len(data) <= PIECE_BYTES or self._is_cheap(data):
            self._receive(data)
        else:
            pieces = self._pieces = Pieces(self._receive, self.pause_reading, self._read_on)
            pieces.take(data)
            if not pieces.is_waiting:
                self._pieces = None

    def _is_cheap(self, data: bytes) -> bool:
        """Whether a large packet takes no parser, and its listener has little to do."""
        reader, pending = self._reader, self._pending
        if isinstance(reader, SizedRest):
            kind = reader.content_type
        elif not isinstance(reader, FamiliarHeads) or pending is None or pending.method == "HEAD":
            return False
        elif (found := reader.reply(data)) is not None:
            kind = found[0].content_type
        else:
            return False
        return kind != _EVENTS or data.count(b"\n") + data.count(b"\r") <= _FEW_LINES

    def _read_on(self) -> None:
        """Read again after a packet that took several turns, unless its listener wants a pause."""
        self._pieces = None
        if self._pending is None or not self._pending.is_paused:
            self.resume_reading()

    def _receive(self, data: bytes) -> None:
        """Read a part of a reply."""
        pending, reader = self._pending, self._reader
        if pending is None:
            self.abort()  # nothing was asked for
            return
        if not isinstance(reader, FamiliarHeads):
            self._hear(pending, *reader.feed(data))
            return
        # The reply begins here, unless the server only asks for the body of the request.
        if pending.awaits_continue and data == CONTINUE:
            pending.continued()
            self._send_more()
            return
        if pending.head:
            pending.heard()
        is_head = pending.method == "HEAD"
        if not is_head and (found := reader.reply(data)) is not None:
            head, parts, rest = found
            if rest == "kept" and len(parts) == 1:
                self.keep_alive_seconds = head.keep_alive_seconds
                self._end(rest, (head, parts[0]))
            else:
                self._hear(pending, head, parts, rest)
            return
        parser = ReplyParser(is_head=is_head, is_lenient=pending.is_lenient)
        read = parser.feed(data)
        if parser.ending == "kept":
            reader.learn(data)
        self._hear(pending, *read)

    def eof_received(self) -> None:
        """The upstream sends nothing more."""
        is_proper = is_ended_properly(self._transport)  # now: behind the pieces, the connection is closed
        if self._pieces is None:
            self._ended(is_proper=is_proper)
        else:
            self._pieces.then(partial(self._ended, is_proper=is_proper))

    def _ended(self, *, is_proper: bool) -> None:
        """The upstream has ended the connection, and everything is parsed that was read from it."""
        if self._pending is None:
            self._owner.ended_idle(self)
        if is_proper and isinstance(self._reader, UnsizedRest):
            self._end("closed")
        else:
            self.close(self._loss(None))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whichever side."""
        if self._pieces is None:
            self._lost(exc)
        else:
            self._pieces.then(partial(self._lost, exc))

    def _lost(self, exc: Exception | None) -> None:
        """The connection is closed, and everything parsed that was read from it."""
        if exc is not None and self._pending is None:
            self._owner.ended_idle(self)
        self._transport = _NOT_OPEN
        self.close(self._loss(exc))
        self._owner.closed(self)

    def pause_writing(self) -> None:
        """The upstream does not read as fast as the request is written."""
        if self._unsent is not None:
            self._unsent.is_paused = True

    def resume_writing(self) -> None:
        """The upstream has read most of what was written."""
        if self._unsent is not None:
            self._unsent.is_paused = False
            self._send_more()

    # -----------------------------------------------------------------------------------------------------------

    def _hear(self, pending: PendingRequest, head: ReplyHead | None, parts: Iterable[bytes], rest: Rest) -> None:
        """Tell the listener what was read."""
        self._reader = self._familiar if isinstance(rest, (str, MalformedReply)) else rest
        if isinstance(rest, str):
            pending.stage = "read"
        listener = pending.listener
        try:
            if head is not None:
                self.keep_alive_seconds = head.keep_alive_seconds
                listener.on_head(head)
            for part in parts:
                if self._pending is pending:
                    listener.on_body(part)
        except Exception as exc:  # noqa: BLE001 - the outermost edge of a callback
            failure = ListenerFailed()
            failure.__cause__ = exc
            self.close(failure)
        if self._pending is not pending:
            return  # it was aborted, or has failed
        if isinstance(rest, str):
            self._end(rest)
        elif isinstance(rest, MalformedReply):
            self.close(rest)
        elif pending.awaits_continue and isinstance(rest, ReplyParser) and rest.is_continued:
            pending.continued()
            self._send_more()
        else:
            self._poll = None  # only an idle connection needs it, and the rest may come in hours

    def _send_more(self) -> None:
        """Write the request's body as far as the transport takes it."""
        unsent, pending = self._unsent, self._pending
        if unsent is None or pending is None or pending.awaits_continue:
            return
        while unsent.rest and not unsent.is_paused:
            part, unsent.rest = unsent.rest[:_PART_BYTES], unsent.rest[_PART_BYTES:]
            self._transport.write(part)
        if not unsent.rest:
            self._unsent = None

    def _end(self, ending: Ending, whole: tuple[ReplyHead, bytes] | None = None) -> None:
        """Hand the connection back, then tell the listener that its reply is complete."""
        pending, transport = self._pending, self._transport
        assert pending is not None
        self._pending = None
        listener = pending.end()
        is_sent = self._unsent is None and transport.get_write_buffer_size() == 0
        has_extra = self._use == "last" or (self._pieces is not None and self._pieces.has_more)
        if ending == "kept" and is_sent and not has_extra and not transport.is_closing():
            if pending.is_paused:
                transport.resume_reading()
            self._use = "again"
            self._owner.freed(self)
        else:
            self.abort()
        try:
            if whole is None:
                listener.on_end()
            else:
                head, body = whole
                listener.on_whole(head, body)
        except Exception as exc:  # noqa: BLE001 - the outermost edge of a callback
            self._owner.tasks.failed("upstream reply", exc)

    def _loss(self, exc: Exception | None) -> RequestFailed:
        """What it means for the request in flight that the connection ends now."""
        if not isinstance(self._reader, FamiliarHeads):
            return ReplyCut()
        if isinstance(exc, ssl.SSLError) and self._use == "first" and refuses_certificate(exc.reason or ""):
            # With TLS 1.3 a server refuses the client's certificate only after the client has sent its request.
            return TlsRefused(handshake_cause(exc.reason))
        return NoReply()
