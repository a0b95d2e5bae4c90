"""Copies the stderr of a child to the log, within bounds."""

import asyncio
import re
from collections import deque
from collections.abc import Iterable
from typing import Final

from gateway.protocol import mcp
from gateway.runtime.pieces import PieceReader
from gateway.telemetry import Event, LineLimit, get_logger
from gateway.telemetry.redaction import Secrets

log = get_logger()

_LINE_BYTES: Final = 1000
_LINES_PER_SECOND: Final = 50
_KEPT: Final = 5
_COMPLAINT_LINES: Final = 500
_COMPLAINT: Final = re.compile(f"Failed to validate request|{mcp.DISCOVER}")
"""What begins a complaint. Python SDK 1.30 writes 95 lines about an unknown method, the errors of each field."""
_ITS_REST: Final = re.compile(r"\s|\w+(\.\w+)+$")
"""The lines under it are indented, or name a field."""
_SHORTEST_SECRET: Final = 6  # variables are often `1` or `true`


class StderrLog(PieceReader):
    """The stderr of one child. The secrets that it was given in `env` or as arguments are masked."""

    def __init__(self, route: str, secrets: Iterable[str]) -> None:
        super().__init__()
        self.last: deque[str] = deque(maxlen=_KEPT)
        """The last lines, for the report of its end."""
        self.pid = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._route = route
        self._secrets = Secrets(secrets, _SHORTEST_SECRET)
        self._incomplete = b""
        self._limit = LineLimit(_LINES_PER_SECOND)
        self._may_complain = 0
        """How many more lines may complain of the gateway's own question."""
        self._complains = False

    def expect_complaint(self, *, expects: bool = True) -> None:
        """Whether the child is asked what it may not understand: a complaint about that is logged at debug."""
        self._may_complain = _COMPLAINT_LINES if expects else 0

    def take(self, data: bytes) -> None:
        """Log complete lines, and the beginning of long ones."""
        *whole, rest = data.split(b"\n")
        for end in whole:
            self._log(self._incomplete + end)
            self._incomplete = b""
        self._incomplete = (self._incomplete + rest)[: _LINE_BYTES + 1]  # one byte more shows that the line is cut

    def finish(self) -> None:
        """Log the last, incomplete line."""
        self._log(self._incomplete)
        self._incomplete = b""
        if not self.ended.done():
            self._report(self._limit.left_out)
            self.ended.set_result(None)

    def _log(self, line: bytes) -> None:
        text = self._secrets.masked(line[:_LINE_BYTES].decode(errors="replace").rstrip())
        if not text:
            return
        if len(line) > _LINE_BYTES:
            text += "…"
        self.last.append(text)
        goes_on = self._complains and _ITS_REST.match(text) is not None
        self._complains = self._may_complain > 0 and (goes_on or _COMPLAINT.search(text) is not None)
        if self._complains:
            self._may_complain -= 1
            log.debug(Event.CHILD_STDERR, route=self._route, pid=self.pid, text=text)
            return
        left_out = self._limit.take()
        if left_out is not None:
            self._report(left_out)
            log.info(Event.CHILD_STDERR, route=self._route, pid=self.pid, text=text)

    def _report(self, left_out: int) -> None:
        if left_out:
            log.info(Event.CHILD_STDERR, route=self._route, pid=self.pid, lines_left_out=left_out)
