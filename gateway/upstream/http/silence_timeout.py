"""The deadline of a resumed stream that stays silent."""

import asyncio

from gateway.upstream.http.resumption import Resumption


class SilenceTimeout:
    """Ends a resumed stream that is silent for longer than its `Resumption` allows."""

    __slots__ = ("_resumption", "_timeout")

    def __init__(self, resumption: Resumption) -> None:
        self._resumption = resumption
        self._timeout: asyncio.Timeout | None = None

    def start(self) -> asyncio.Timeout:
        """Return the deadline of a stream, a context manager."""
        self._timeout = asyncio.timeout(self._resumption.silence_seconds)
        return self._timeout

    def restart(self) -> None:
        """Measure the silence from now on, if a stream is open."""
        timeout = self._timeout
        if timeout is not None and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time() + self._resumption.silence_seconds)

    def stop(self) -> None:
        """The stream is closed."""
        self._timeout = None
