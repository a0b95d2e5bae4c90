"""The transport of one connection of a client: what was written to it that nobody has read, when it is read from."""

import asyncio
from typing import Final

from gateway.http.server.unread import Unread
from gateway.http_client.reply_head import CONTINUE

_LOST: Final = "the client has closed its connection"


class Wire:
    """What requests and responses need of their connection."""

    __slots__ = (
        "_out",
        "_pauses",
        "_room",
        "has_written",
        "is_behind",
        "is_finishing",
        "is_last",
        "is_lost",
        "is_secure",
        "remote",
        "unread",
    )

    def __init__(self, out: asyncio.Transport, unread: Unread) -> None:
        self._out = out
        self.unread = unread
        peer = out.get_extra_info("peername")
        self.remote: str | None = peer[0] if isinstance(peer, tuple) else peer
        """The address of the client."""
        self.is_secure = out.get_extra_info("sslcontext") is not None
        """Whether it is TLS."""
        self.is_behind = False
        """Whether the client has not read everything."""
        self.is_finishing = False
        """Whether a reply is being written that no handler watches."""
        self.is_last = False
        """Whether the connection ends with the next reply."""
        self.has_written = False
        """Whether a part of the reply to the present request was written."""
        self.is_lost = False
        """Whether the connection is closed."""
        self._room: asyncio.Future[None] | None = None
        """While somebody waits until the client has read everything."""
        self._pauses = 0
        """For how many reasons nothing is read."""

    # -- writing ------------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether a part of a reply has not reached the kernel yet."""
        return self.is_finishing or self.unread.is_in_process

    def write(self, data: bytes | memoryview) -> None:
        """Write a part of a response; raises ConnectionError."""
        if self._out.is_closing():
            raise ConnectionResetError(_LOST)
        self.has_written = True
        self._out.write(data)

    def say_continue(self) -> None:
        """Tell the client to send the body, unless it has left."""
        if not self._out.is_closing():
            self.is_finishing = True
            self._out.write(CONTINUE)  # whoever cannot read it now is watched while this is set
            self.is_finishing = False

    async def drained(self) -> None:
        """Wait until the client has read everything; raises ConnectionError."""
        if not self.is_behind:
            return
        if self.is_lost:
            raise ConnectionResetError(_LOST)
        if self._room is None or self._room.done():
            self._room = asyncio.Future()
        await asyncio.shield(self._room)

    def unsent(self, count: int) -> None:
        """Count the part of a reply that its handler has not written yet."""
        self.unread.unsent = count
        self.unread.count(is_behind=self.is_behind)

    def end(self) -> None:
        """Close the connection once what was written has reached the kernel."""
        self._out.close()

    def abort(self) -> None:
        """Close the connection now: the client sees that its reply is incomplete."""
        self._out.abort()

    # -- reading ------------------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Read nothing more for now."""
        self._pauses += 1
        if self._pauses == 1 and not self._out.is_closing():
            self._out.pause_reading()

    def resume_reading(self) -> None:
        """Read on, once each reason for a pause is gone."""
        self._pauses -= 1
        if not self._pauses and not self._out.is_closing():
            self._out.resume_reading()

    # -- what the transport says --------------------------------------------------------------------------------

    def fell_behind(self) -> None:
        """Count what the client has not read."""
        self.is_behind = True
        self.unread.count(is_behind=True)
        if self.is_finishing and not self.unread.unsent:
            self.unread.watch()

    def caught_up(self) -> None:
        """Stop counting: the client has read everything."""
        self.is_behind = False
        self.unread.count(is_behind=False)
        self.unread.caught_up()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def lost(self) -> None:
        """The client has left: whoever waits for it hears so."""
        self.is_lost = True
        self.unread.close()
        if self._room is not None and not self._room.done():
            self._room.set_exception(ConnectionResetError(_LOST))
            _ = self._room.exception()  # nobody may wait any more
