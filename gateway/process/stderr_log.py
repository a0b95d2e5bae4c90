"""What a child says on stderr: to the log, a bounded part of it, and never understood."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from gateway.telemetry import Event, get_logger

log = get_logger()

_LINE_BYTES: Final = 1000
_LINES_PER_SECOND: Final = 50
_KEPT: Final = 5
_SHORTEST_SECRET: Final = 6
_HIDDEN: Final = "[hidden]"


class StderrLog(asyncio.Protocol):
    """One child's stderr. Secrets that it was given in `env` or as arguments are masked, should it repeat them."""

    def __init__(self, route: str, given: Iterable[str]) -> None:
        self.last: deque[str] = deque(maxlen=_KEPT)
        """The last lines, for who reports its end."""
        self.pid = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._route = route
        self._given = sorted((value for value in given if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)
        self._begun = b""
        self._second = 0
        self._said = 0
        self._dropped = 0

    def data_received(self, data: bytes) -> None:
        """Log whole lines; of a long one its beginning."""
        *whole, rest = data.split(b"\n")
        for end in whole:
            self._say(self._begun + end)
            self._begun = b""
        self._begun = (self._begun + rest)[: _LINE_BYTES + 1]

    def connection_lost(self, _exc: Exception | None) -> None:
        """Log what had no line's end yet."""
        self._say(self._begun)
        self._begun = b""
        self._report_dropped()
        if not self.ended.done():
            self.ended.set_result(None)

    def _say(self, line: bytes) -> None:
        text = line[:_LINE_BYTES].decode(errors="replace").rstrip()
        if not text:
            return
        for value in self._given:
            text = text.replace(value, _HIDDEN)
        if len(line) > _LINE_BYTES:
            text += "…"
        self.last.append(text)
        second = int(time.monotonic())
        if second != self._second:
            self._report_dropped()
            self._second, self._said = second, 0
        self._said += 1
        if self._said > _LINES_PER_SECOND:
            self._dropped += 1
        else:
            log.info(Event.CHILD_STDERR, route=self._route, pid=self.pid, text=text)

    def _report_dropped(self) -> None:
        if self._dropped:
            log.info(Event.CHILD_STDERR, route=self._route, pid=self.pid, lines_left_out=self._dropped)
            self._dropped = 0
