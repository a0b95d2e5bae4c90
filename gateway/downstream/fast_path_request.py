"""A request on the fast path: it came whole, so callbacks serve it, without a task, until its one message."""

from collections.abc import Awaitable, Callable
from typing import Final

from gateway.bridge.driver import Driver
from gateway.bridge.response_queue import FinalMessage
from gateway.cluster.peer_listener import Encode
from gateway.downstream.legs import Begun, Forwarded
from gateway.downstream.round import LEFT, Round
from gateway.downstream.unread_retry import UnreadRetry
from gateway.http.incoming import Incoming
from gateway.http.server.connection import Connection
from gateway.http.server.known_heads import ParsedHead
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, json_response

AnyRound = Round | UnreadRetry
Begin = Callable[[AnyRound], Begun | None]
"""Begins to serve a round; None if only a task can find out where it goes."""

_WHOLE_BYTES: Final = 65_536
"""A task sends larger replies, in pieces."""


class FastPathRequest:
    """A call, or a retry of a held one. Its connection calls `serve` or `leave`, or gets the reply from it."""

    __slots__ = ("_all", "_connection", "_go_on", "error", "head", "incoming", "plain", "round", "waits")

    def __init__(
        self,
        connection: Connection,
        head: ParsedHead,
        incoming: Incoming,
        go_on: "Callable[[FastPathRequest, HttpRequest], Awaitable[Response]]",
        all_: "dict[FastPathRequest, None]",
    ) -> None:
        """`go_on` serves it in a task. It stays in `all_` until then, until its reply, or until its client left."""
        self.head = head
        self.incoming = incoming
        self.round: AnyRound | None = None
        """Set if it is a modern request that passed all checks, or that another replica is to check."""
        self.plain: Begun | None = None
        """Set once it was sent upstream, or to another replica."""
        self.error: Exception | None = None
        """Why it was not sent."""
        self._connection = connection
        self._go_on = go_on
        self.waits = False
        """Whether it waits for a result."""
        self._all = all_
        all_[self] = None

    def begin(self, round_: AnyRound, begin: Begin) -> None:
        """Send it upstream, or to the replica that holds its call, unless only a task can find out where it goes."""
        self.round = round_
        try:
            self.plain = begin(round_)
        except Exception as exc:  # noqa: BLE001  (the task raises it: the call must not begin a second time)
            self.error = exc
        if self.plain is None:
            if self.error is None and isinstance(round_, UnreadRetry):
                self.round = None  # it has to be read
        else:
            self.waits = True
            self.plain.waiter.add_done_callback(self._settled)

    @property
    def exchanges(self) -> tuple[Driver, ...]:
        """The exchange of a call that waits here; it becomes one for this."""
        plain = self.plain
        if plain is None or plain.final is not None or isinstance(plain, Forwarded):
            return ()
        return (plain.promote(),)

    def serve(self, http: HttpRequest) -> Awaitable[Response]:
        """Serve it in a task from now on."""
        _ = self._all.pop(self, None)
        try:
            return self._go_on(self, http)
        finally:
            self.error = None  # its traceback refers to this object

    def leave(self) -> None:
        """Cancel it: its client has closed the connection."""
        _ = self._all.pop(self, None)
        if self.plain is not None and self.round is not None:
            self.plain.leave()
            self.round.count(LEFT)

    def _settled(self, _: object) -> None:
        """Send the only message; anything else takes a task."""
        connection, plain, round_ = self._connection, self.plain, self.round
        if connection.in_hand is not self or plain is None or round_ is None:
            return
        final = plain.take()
        if final is None or final.cause is not None or len(final.body) > _WHOLE_BYTES:
            connection.serve_by_task()
            return
        _ = self._all.pop(self, None)
        round_.count(final.ending)
        connection.reply(self._encoded(final))

    def _encoded(self, final: FinalMessage) -> bytes:
        """The bytes of the reply."""
        return json_response(final.body, self.incoming.request_id)


class FastPathHop(FastPathRequest):
    """A retry of a held call that another replica forwarded."""

    __slots__ = ("_encode",)

    def __init__(  # noqa: PLR0913  (as of FastPathRequest)
        self,
        connection: Connection,
        head: ParsedHead,
        incoming: Incoming,
        go_on: Callable[[FastPathRequest, HttpRequest], Awaitable[Response]],
        all_: dict[FastPathRequest, None],
        encode: Encode,
    ) -> None:
        """`encode` makes the bytes of its reply."""
        super().__init__(connection, head, incoming, go_on, all_)
        self._encode = encode

    def begin(self, round_: AnyRound, begin: Begin) -> None:
        """Answer the call, if it is held here. If its reply takes long, a task tells that the retry was accepted."""
        super().begin(round_, begin)
        if self.waits:
            round_.live.deadlines.hop.arm(self, self._accept)

    def _accept(self) -> None:
        if self._connection.in_hand is self:
            self._connection.serve_by_task()

    def serve(self, http: HttpRequest) -> Awaitable[Response]:
        """Serve it in a task from now on."""
        self._stop_timer()
        return super().serve(http)

    def leave(self) -> None:
        """The other replica has closed its connection."""
        self._stop_timer()
        super().leave()

    def _encoded(self, final: FinalMessage) -> bytes:
        self._stop_timer()
        return self._encode(final.body, final.status, final.headers, final.ending)

    def _stop_timer(self) -> None:
        if self.round is not None:
            self.round.live.deadlines.hop.disarm(self)
