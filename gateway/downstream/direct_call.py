"""A request that no task serves, because it came whole: a plain call, as long as its result alone is expected."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from gateway.bridge.driver import Driver
from gateway.bridge.plain_call import PlainCall
from gateway.downstream.round import LEFT, Round
from gateway.http.connection import Connection
from gateway.http.incoming import Incoming
from gateway.http.request_parser import ParsedHead

_WHOLE_BYTES: Final = 65_536
"""A task sends larger replies, in pieces."""


class DirectCall:
    """One such request. Its connection calls `serve` or `leave`, or gets the reply from it."""

    __slots__ = ("_all", "_connection", "_go_on", "error", "head", "incoming", "plain", "round", "waits")

    def __init__(
        self,
        connection: Connection,
        head: ParsedHead,
        incoming: Incoming,
        go_on: "Callable[[DirectCall, web.BaseRequest], Awaitable[web.StreamResponse]]",
        all_: "set[DirectCall]",
    ) -> None:
        """`go_on` serves it in a task. It stays in `all_` until then, until its reply, or until its client left."""
        self.head = head
        self.incoming = incoming
        self.round: Round | None = None
        """Set if it is a modern request that passed all checks."""
        self.plain: PlainCall | None = None
        """Set once it was sent upstream."""
        self.error: Exception | None = None
        """Why it was not sent."""
        self._connection = connection
        self._go_on = go_on
        self.waits = False
        """Whether it waits for a result."""
        self._all = all_
        all_.add(self)

    def begin(self, round_: Round, begin: Callable[[Round], PlainCall | None]) -> None:
        """Send it upstream, if it is a plain call."""
        self.round = round_
        try:
            self.plain = begin(round_)
        except Exception as exc:  # noqa: BLE001  (the task raises it: the call must not begin a second time)
            self.error = exc
        if self.plain is not None:
            self.waits = True
            self.plain.waiter.add_done_callback(self._settled)

    @property
    def exchanges(self) -> tuple[Driver, ...]:
        """The exchange of a call that waits; it becomes one for this."""
        return () if self.plain is None or self.plain.final is not None else (self.plain.promote(),)

    def serve(self, http: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        """Serve it in a task from now on."""
        self._all.discard(self)
        try:
            return self._go_on(self, http)
        finally:
            self.error = None  # its traceback refers to this object

    def leave(self) -> None:
        """Cancel it: its client has closed the connection."""
        self._all.discard(self)
        if self.plain is not None and self.round is not None:
            self.plain.leave()
            self.round.count(LEFT)

    def _settled(self, _: asyncio.Future[None]) -> None:
        """Send the result; anything else takes a task."""
        connection, plain, round_ = self._connection, self.plain, self.round
        if connection.in_hand is not self or plain is None or round_ is None:
            return
        if plain.final is None or len(plain.final.body) > _WHOLE_BYTES:
            connection.serve_by_task()
            return
        self._all.discard(self)
        round_.count(plain.final.ending)
        connection.reply(plain.final.body, self.incoming.request_id)
