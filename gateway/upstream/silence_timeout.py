"""How long a stream that was picked up may be silent."""

import asyncio
from typing import Final

_SILENCE_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""How long a stream that was picked up may be silent until it is opened again; after an answer from the start."""


class SilenceTimeout:
    """How long a stream that was picked up may be silent until it is opened again.

    Longer from time to time, and as short as at first after an answer: the result may come at once, and the server may
    have tied it to another stream.
    """

    def __init__(self) -> None:
        self._step = 0
        self._timeout: asyncio.Timeout | None = None

    def watch(self) -> asyncio.Timeout:
        """The deadline of one stream, to be entered."""
        self._timeout = asyncio.timeout(self._seconds)
        return self._timeout

    def lengthen(self) -> None:
        """A stream was silent for too long, or did not last."""
        self._step = min(self._step + 1, len(_SILENCE_SECONDS) - 1)

    def answered(self) -> None:
        """The server accepted an answer."""
        self._step = 0
        self.heard()

    def heard(self) -> None:
        """The stream is alive."""
        timeout = self._timeout
        if timeout is not None and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time() + self._seconds)

    def rest(self) -> None:
        """No stream is open."""
        self._timeout = None

    @property
    def _seconds(self) -> float:
        return _SILENCE_SECONDS[self._step]
