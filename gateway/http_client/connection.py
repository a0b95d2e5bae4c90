"""One connection to an upstream, which carries one request after another.

Rule 1: a connection is used again only if its last reply was complete, and neither side has anything left to say in
it. Whatever else comes, it is closed: what remains would be taken for the next reply.
Rule 2: the listener is called from `data_received`. It may abort the request or pause its reply in every method. Once
the reply is complete, the connection is ready for another request before the listener hears of it.
Rule 3: llhttp parses strictly. Allowed are lines that end in a bare LF, and spaces behind the size of a chunk, which
servers send in the wild. For a request that passes through, the values of headers may have control characters too;
llhttp then allows spaces behind a name as well, which is checked here. The bodies of replies that end with the
connection are delimited here, because httptools does not offer llhttp's `finish`.
"""

import asyncio
import re
import select
import ssl
from typing import Final, Protocol, cast

import httptools

from gateway.http_client.errors import ListenerFailed, MalformedReply, NoReply, ReplyCut, RequestFailed, TlsRefused
from gateway.http_client.origin import Origin
from gateway.http_client.pending_request import PendingRequest, ReplyListener
from gateway.http_client.reply_head import ReplyHead
from gateway.http_client.tls_errors import handshake_cause

MAX_HEAD_BYTES: Final = 65_536
"""The bound for the head of a reply. It also holds for all else that is not body: interim replies, chunk extensions,
trailers."""
MAX_INTERIM_REPLIES: Final = 16
_PART_BYTES: Final = 131_072
"""A larger body of a request is written in parts of this size, so that no more of it is copied into buffers."""
_SWITCHING_PROTOCOLS: Final = 101
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class Owner(Protocol):
    """The client that a connection belongs to."""

    def freed(self, connection: "Connection") -> None:
        """The connection can carry another request."""

    def closed(self, connection: "Connection") -> None:
        """The connection has ended."""

    def listener_raised(self, error: Exception) -> None:
        """The last method of a listener raised."""


class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    __slots__ = (
        "_fields",
        "_has_extra",
        "_heard",
        "_interim",
        "_is_complete",
        "_is_head",
        "_is_interim",
        "_is_lenient",
        "_is_writing_paused",
        "_keeps_alive",
        "_listener",
        "_other_bytes",
        "_owner",
        "_parser",
        "_pending",
        "_reason",
        "_requests",
        "_socket",
        "_transport",
        "_unsent",
        "_until_close",
        "expires",
        "keep_alive_seconds",
        "origin",
    )

    def __init__(self, origin: Origin, owner: Owner) -> None:
        self.origin = origin
        self.expires = 0.0
        """Until when the owner may use the connection again."""
        self.keep_alive_seconds: int | None = None
        """How long the upstream keeps the connection open, if its last reply says so."""
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._socket = -1
        self._parser: httptools.HttpResponseParser
        self._pending: PendingRequest | None = None
        self._listener: ReplyListener | None = None
        """The listener of the request in flight."""
        self._requests = 0
        self._unsent: memoryview | None = None
        """The rest of the request's body, of which no byte is in the transport yet."""
        self._is_writing_paused = False
        self._is_lenient = False
        self._reset(is_head=False)

    def _reset(self, *, is_head: bool) -> None:
        """Expect the reply to another request."""
        self._is_head = is_head
        self._heard = False
        """Whether a byte of the reply is here."""
        self._fields: list[tuple[bytes, bytes]] | None = []
        """The headers so far; None once the head is complete."""
        self._reason = b""
        self._interim = 0
        self._is_interim = False
        """Whether the parser is in an interim reply."""
        self._other_bytes = 0
        """How much was read since the last byte of a body."""
        self._until_close = False
        self._is_complete = False
        self._has_extra = False
        """Whether the upstream sent something behind the complete reply."""
        self._keeps_alive = False

    # -- for the client -----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as the event loop knows, and carries no request."""
        return self._transport is not None and self._pending is None and not self._transport.is_closing()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing lies in the socket, such as the end of the connection: the event loop looks there later."""
        socket = select.poll()
        socket.register(self._socket, select.POLLIN)
        return not socket.poll(0)

    def start(self, pending: PendingRequest, head: bytes, body: bytes, *, is_head: bool) -> None:
        """Send a request on an open connection."""
        transport = self._transport
        assert transport is not None, "the connection is open"
        self._reset(is_head=is_head)
        self._requests += 1
        self._pending = pending
        self._listener = pending.listener
        pending.carried(self)
        if pending.is_lenient is not self._is_lenient:
            self._is_lenient = pending.is_lenient
            self._parser.set_dangerous_leniencies(lenient_headers=self._is_lenient)
        if pending.is_paused:
            transport.pause_reading()
        if len(body) <= _PART_BYTES:
            transport.write(head + body if body else head)
            return
        transport.write(head)
        self._unsent = memoryview(body)
        self._send_more()

    def close(self, failure: RequestFailed) -> None:
        """Close the connection. A request in it fails."""
        self._fail(failure)

    # -- for the request in flight ------------------------------------------------------------------------------

    def abort(self) -> None:
        """Close the connection at once, without a word to the listener."""
        self._pending = self._listener = self._unsent = None
        if self._transport is not None:
            # A close would first wait until the rest of the request is sent.
            self._transport.abort()

    def pause_reading(self) -> None:
        """Read nothing more from the socket."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- from the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open, TLS included."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have other bases
        self._socket = transport.get_extra_info("socket").fileno()
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)

    def data_received(self, data: bytes) -> None:
        """Parse what was read; the parser calls the methods of the listener."""
        pending = self._pending
        if pending is None:
            self.abort()  # nothing was asked for
            return
        self._heard = True
        self._other_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            self._stop(exc.__context__)
        except httptools.HttpParserError as exc:
            self._has_extra = True
            if not self._is_complete:
                self._fail(MalformedReply(str(exc)))
        if self._pending is not pending:
            return  # it was aborted, or has failed
        if self._is_complete:
            self._end()
        elif self._other_bytes > MAX_HEAD_BYTES:
            self._fail(MalformedReply(f"more than {MAX_HEAD_BYTES} bytes that are no body"))

    def eof_received(self) -> None:
        """The upstream sends nothing more."""
        if self._pending is not None and self._until_close and self._is_ended_properly():
            self._is_complete = True
            self._end()
        else:
            self._fail(self._loss(None))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whichever side."""
        self._transport = None
        self._fail(self._loss(exc))
        del self._parser  # it refers to this object
        self._owner.closed(self)

    def pause_writing(self) -> None:
        """The upstream does not read as fast as the request is written."""
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        """The upstream has read most of what was written."""
        self._is_writing_paused = False
        self._send_more()

    # -- from the parser ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A reply begins."""
        if self._is_complete:
            self._has_extra = True

    def on_status(self, text: bytes) -> None:
        """A part of the reason phrase."""
        if self._fields is not None:
            self._reason += text

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; those of trailers are ignored. Raises MalformedReply."""
        if self._is_lenient and _TOKEN.fullmatch(name) is None:
            raise MalformedReply("a header whose name is not a token")
        if self._fields is not None:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """A head is complete. Raises MalformedReply."""
        fields, listener = self._fields, self._listener
        if fields is None or listener is None:
            return  # it belongs to nothing that was asked for
        status = self._parser.get_status_code()
        if self._other_bytes > MAX_HEAD_BYTES:
            # Much of what was read may be body.
            _check_size(fields)
        if status < 200:
            self._skip_interim(status)
            return
        head = ReplyHead(status, self._parser.get_http_version(), fields, self._reason)
        self._until_close = _is_delimited_by_close(head)
        self._fields = None
        self._other_bytes = 0
        self.keep_alive_seconds = head.keep_alive_seconds
        # The parser expects a body, because it does not know of the HEAD. The connection is not used again.
        self._is_complete = self._is_head
        listener.on_head(head)

    def on_body(self, data: bytes) -> None:
        """A part of a body."""
        self._other_bytes = 0
        if self._listener is not None and not self._is_complete:
            self._listener.on_body(data)

    def on_message_complete(self) -> None:
        """A reply is complete."""
        if self._is_interim:
            self._is_interim = False
        elif not self._is_complete:
            self._is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()

    # -----------------------------------------------------------------------------------------------------------

    def _skip_interim(self, status: int) -> None:
        """Leave out a reply like 100 or 103. Raises MalformedReply."""
        if status == _SWITCHING_PROTOCOLS or status < 100:
            raise MalformedReply(f"status {status}, which was not asked for")
        self._interim += 1
        if self._interim > MAX_INTERIM_REPLIES:
            raise MalformedReply(f"more than {MAX_INTERIM_REPLIES} interim replies")
        self._is_interim = True
        self._fields = []
        self._reason = b""

    def _send_more(self) -> None:
        """Write the request's body as far as the transport takes it."""
        while self._unsent and self._transport is not None and not self._is_writing_paused:
            part = self._unsent[:_PART_BYTES]
            self._unsent = self._unsent[_PART_BYTES:] or None
            self._transport.write(part)

    def _end(self) -> None:
        """Hand the connection back, then tell the listener that its reply is complete."""
        pending, transport = self._pending, self._transport
        assert pending is not None
        assert transport is not None
        self._pending = self._listener = None
        listener = pending.end()
        is_sent = self._unsent is None and transport.get_write_buffer_size() == 0
        if self._keeps_alive and is_sent and not self._has_extra and not transport.is_closing():
            if pending.is_paused:
                transport.resume_reading()
            self._owner.freed(self)
        else:
            self.abort()
        try:
            listener.on_end()
        except Exception as exc:  # noqa: BLE001 - the outermost edge of a callback
            self._owner.listener_raised(exc)

    def _stop(self, error: BaseException | None) -> None:
        """A callback raised."""
        if isinstance(error, MalformedReply):
            self._fail(error)
            return
        if not isinstance(error, Exception):
            self.abort()
            assert error is not None
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
        if self._heard:
            return ReplyCut()
        if isinstance(exc, ssl.SSLError) and self._requests == 1 and "ALERT" in (exc.reason or ""):
            # With TLS 1.3 a server refuses the client's certificate only after the client has sent its request.
            return TlsRefused(handshake_cause(exc.reason))
        return NoReply(reused=self._requests > 1)

    def _fail(self, failure: RequestFailed) -> None:
        """Close the connection and tell the listener why its reply will not be completed."""
        pending = self._pending
        self.abort()
        if pending is None:
            return
        listener = pending.end()
        try:
            listener.on_failed(failure)
        except Exception as exc:  # noqa: BLE001 - the outermost edge of a callback
            self._owner.listener_raised(exc)


def _check_size(fields: list[tuple[bytes, bytes]]) -> None:
    """Raise MalformedReply if a head is too large."""
    if sum(len(name) + len(value) + 4 for name, value in fields) > MAX_HEAD_BYTES:
        raise MalformedReply(f"a head of more than {MAX_HEAD_BYTES} bytes")


def _is_delimited_by_close(head: ReplyHead) -> bool:
    """Whether the body, if there is one, ends with the connection. Raises MalformedReply."""
    if head.version not in ("1.0", "1.1"):
        raise MalformedReply(f"HTTP version {head.version}")
    codings = head.get_all(b"transfer-encoding")
    if not codings:
        return head.get(b"content-length") is None
    if codings[0].lower() != b"chunked" or len(codings) > 1 or head.version == "1.0":
        raise MalformedReply("a transfer coding that was not asked for")
    return False
