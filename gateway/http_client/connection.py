"""One connection to an upstream, which carries one request after another.

Rule 1: a connection is used again only if its last reply was complete, and neither side has anything left to say in
it. Whatever else comes, it is closed: what remains would be taken for the next reply.
Rule 2: the listener is called from `data_received`. It may abort the request or pause its reply in every method. Once
the reply is complete, the connection is ready for another request before the listener hears of it.
Rule 3: no upstream holds the event loop: what takes long to parse is parsed in several turns (`runtime.pieces`).
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, cast

from gateway import world
from gateway.http_client.errors import ListenerFailed, MalformedReply, NoReply, ReplyCut, RequestFailed, TlsRefused
from gateway.http_client.familiar_heads import FamiliarHeads
from gateway.http_client.origin import Origin
from gateway.http_client.pending_request import PendingRequest
from gateway.http_client.reply_body import Ending, SizedBody, UnsizedBody
from gateway.http_client.reply_head import CONTINUE, ReplyHead
from gateway.http_client.reply_parser import Reader, ReplyParser, Rest
from gateway.http_client.tls_errors import handshake_cause, refuses_certificate
from gateway.runtime.pieces import PIECE_BYTES, Pieces

_EVENTS: Final = "text/event-stream"
_PART_BYTES: Final = 131_072
"""A larger body of a request is written in parts of this size, so that no more of it is copied into buffers."""
_FEW_LINES: Final = 64
"""A part of an event stream that has fewer is cheap to read, whatever its size."""


class Owner(Protocol):
    """The client that a connection belongs to."""

    def send_again(self, pending: PendingRequest) -> None:
        """The connection has ended without a byte of a reply to this request, which may be sent once more."""

    def freed(self, connection: "Connection") -> None:
        """The connection can carry another request."""

    def ended_idle(self, connection: "Connection") -> None:
        """The upstream has ended the connection, which carried no request."""

    def closed(self, connection: "Connection") -> None:
        """The connection has ended."""

    def listener_raised(self, error: Exception) -> None:
        """The last method of a listener raised."""


@dataclass(slots=True, eq=False, repr=False)
class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    origin: Origin
    _owner: Owner
    _familiar: FamiliarHeads
    """Shared by the connections to one server."""
    keep_alive_seconds: int | None = None
    """How long the upstream keeps the connection open, if its last reply says so."""
    _transport: asyncio.Transport | None = None
    _socket: world.Socket | None = None
    _poll: Callable[[], object] | None = None
    """Made when the connection is used again."""
    _pending: PendingRequest | None = None
    """The request in flight."""
    _rest: Reader | None = None
    """What reads on in the reply; None before a byte of it is here."""
    _requests: int = 0
    _pieces: Pieces | None = None
    """While a packet of more than one piece is parsed."""
    _unsent: bytes | memoryview | None = None
    """The rest of the request's body, of which no byte is in the transport yet."""
    _is_writing_paused: bool = False
    _is_distrusted: bool = False

    # -- for the client -----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as the event loop knows, and carries no request."""
        return self._transport is not None and self._pending is None and not self._transport.is_closing()

    def is_usable(self) -> bool:
        """Whether it is open and nothing lies in its socket, such as its end: the event loop looks there later."""
        transport = self._transport
        if transport is None or self._pending is not None or transport.is_closing():
            return False
        poll = self._poll
        if poll is None:
            assert self._socket is not None, "the connection is open"
            poll = self._poll = world.poll(self._socket)
        return not poll()

    def uses(self, socket: world.Socket) -> None:
        """The connection will be opened on this socket, which the event loop keeps; its number would take memory."""
        self._socket = socket

    def start(self, pending: PendingRequest) -> None:
        """Send a request on an open connection."""
        transport = self._transport
        assert transport is not None, "the connection is open"
        head, body = pending.head, pending.body
        pending.sent_on(self)
        self._rest = None
        self._requests += 1
        self._pending = pending
        if pending.is_paused:
            transport.pause_reading()
        if len(body) <= _PART_BYTES and not pending.awaits_continue:
            transport.write(head + body if body else head)
            return
        transport.write(head)
        self._unsent = body if len(body) <= _PART_BYTES else memoryview(body)
        if not pending.awaits_continue:
            self._send_more()

    def close(self, failure: RequestFailed) -> None:
        """Close the connection. A request in it fails."""
        self._fail(failure)

    # -- for the request in flight ------------------------------------------------------------------------------

    def abort(self) -> None:
        """Close the connection at once, without a word to the listener."""
        if isinstance(self._rest, ReplyParser):
            self._rest.release()
        self._pending = self._rest = self._unsent = None
        if self._transport is not None:
            # A close would first wait until the rest of the request is sent.
            self._transport.abort()
        if self._pieces is not None:
            self._pieces.drop()

    def pause_reading(self) -> None:
        """Read nothing more from the socket."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again, unless what was read from it waits to be parsed."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._pieces is None or not self._pieces.is_waiting:
            self._transport.resume_reading()

    def distrust(self) -> None:
        """Carry no further request: one that has begun already is the last."""
        if self._pending is None:
            self.abort()
        else:
            self._is_distrusted = True

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
        rest, pending = self._rest, self._pending
        if isinstance(rest, SizedBody):
            kind = rest.content_type
        elif rest is None and pending is not None and not pending.is_head and (found := self._familiar.reply(data)):
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
        pending, rest = self._pending, self._rest
        if pending is None:
            self.abort()  # nothing was asked for
        elif rest is None:
            self._begin_reply(pending, data)
        else:
            self._hear(pending, *rest.feed(data))

    def _begin_reply(self, pending: PendingRequest, data: bytes) -> None:
        """Read the first bytes of a reply."""
        if pending.awaits_continue and data == CONTINUE:
            pending.continued()
            self._send_more()
            return
        if pending.is_repeatable:
            pending.keep_nothing()
        if not pending.is_head and (found := self._familiar.reply(data)) is not None:
            head, parts, rest = found
            if rest == "kept" and len(parts) == 1:
                self.keep_alive_seconds = head.keep_alive_seconds
                self._end(rest, (head, parts[0]))
            else:
                self._hear(pending, head, parts, rest)
            return
        parser = ReplyParser(is_head=pending.is_head, is_lenient=pending.is_lenient)
        read = parser.feed(data)
        if parser.ending == "kept":
            self._familiar.learn(data)
        self._hear(pending, *read)

    def eof_received(self) -> None:
        """The upstream sends nothing more."""
        if self._pieces is None:
            self._ended(is_proper=None)
        else:  # over TLS its alert is read now, before the connection is closed
            self._pieces.then(partial(self._ended, is_proper=self._is_ended_properly()))

    def _ended(self, *, is_proper: bool | None) -> None:
        """The upstream has ended the connection; `is_proper` if that is known to be its own doing."""
        if self._pending is None:
            self._owner.ended_idle(self)
        if not isinstance(self._rest, UnsizedBody):
            is_proper = False
        elif is_proper is None:
            is_proper = self._is_ended_properly()
        if is_proper:
            self._end("closed")
        else:
            self._fail(self._loss(None))

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
        self._transport = None
        self._fail(self._loss(exc))
        self._owner.closed(self)

    def pause_writing(self) -> None:
        """The upstream does not read as fast as the request is written."""
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        """The upstream has read most of what was written."""
        self._is_writing_paused = False
        self._send_more()

    # -----------------------------------------------------------------------------------------------------------

    def _hear(self, pending: PendingRequest, head: ReplyHead | None, parts: Iterable[bytes], rest: Rest) -> None:
        """Tell the listener what was read."""
        self._rest = None if isinstance(rest, (str, MalformedReply)) else rest
        pending.is_read, listener = isinstance(rest, str), pending.listener
        try:
            if head is not None:
                self.keep_alive_seconds = head.keep_alive_seconds
                listener.on_head(head)
            for part in parts:
                if self._pending is pending:
                    listener.on_body(part)
        except BaseException as exc:  # noqa: BLE001 - the outermost edge of a callback
            self._stop(exc)
        if self._pending is not pending:
            return  # it was aborted, or has failed
        if isinstance(rest, str):
            self._end(rest)
        elif isinstance(rest, MalformedReply):
            self._fail(rest)
        elif pending.awaits_continue and isinstance(rest, ReplyParser) and rest.is_continued:
            pending.continued()
            self._send_more()
        else:
            self._poll = None  # only an idle connection needs it, and the rest may come in hours

    def _send_more(self) -> None:
        """Write the request's body as far as the transport takes it."""
        if self._pending is None or self._pending.awaits_continue:
            return
        while self._unsent and self._transport is not None and not self._is_writing_paused:
            part = self._unsent[:_PART_BYTES]
            self._unsent = self._unsent[_PART_BYTES:] or None
            self._transport.write(part)

    def _end(self, ending: Ending, whole: tuple[ReplyHead, bytes] | None = None) -> None:
        """Hand the connection back, then tell the listener that its reply is complete."""
        pending, transport = self._pending, self._transport
        assert pending is not None
        assert transport is not None
        self._pending = None
        listener = pending.end()
        is_sent = self._unsent is None and transport.get_write_buffer_size() == 0
        has_extra = self._is_distrusted or (self._pieces is not None and self._pieces.has_more)
        if ending == "kept" and is_sent and not has_extra and not transport.is_closing():
            if pending.is_paused:
                transport.resume_reading()
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
            self._owner.listener_raised(exc)

    def _stop(self, error: BaseException) -> None:
        """The listener raised."""
        if not isinstance(error, Exception):
            self.abort()
            raise error
        failure = ListenerFailed()
        failure.__cause__ = error
        self._fail(failure)

    def _is_ended_properly(self) -> bool:
        """Whether the upstream itself ended the connection. Over TLS, its alert proves it (RFC 9112 section 9.8)."""
        assert self._transport is not None
        tls = self._transport.get_extra_info("ssl_object")
        if tls is None:
            return True
        try:
            # asyncio reports both ends alike. After the alert, OpenSSL reads the end; without it, OpenSSL wants more.
            return not tls.read(1)
        except ssl.SSLZeroReturnError:
            return True
        except ssl.SSLError:
            return False

    def _loss(self, exc: Exception | None) -> RequestFailed:
        """What it means for the request in flight that the connection ends now."""
        if self._rest is not None:
            return ReplyCut()
        if isinstance(exc, ssl.SSLError) and self._requests == 1 and refuses_certificate(exc.reason or ""):
            # With TLS 1.3 a server refuses the client's certificate only after the client has sent its request.
            return TlsRefused(handshake_cause(exc.reason))
        return NoReply()

    def _fail(self, failure: RequestFailed) -> None:
        """Close the connection and tell the listener why its reply will not be completed."""
        pending = self._pending
        self.abort()
        if pending is None:
            return
        if isinstance(failure, NoReply) and pending.repeats():
            # The upstream may have closed a connection that was idle, and so may it the other idle ones. It may also
            # have closed a new one, if this process stood still before it used that.
            self._owner.send_again(pending)
            return
        listener = pending.end()
        try:
            listener.on_failed(failure)
        except Exception as exc:  # noqa: BLE001 - the outermost edge of a callback
            self._owner.listener_raised(exc)
