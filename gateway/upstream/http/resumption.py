"""Decides from which event a broken stream is resumed, after which pause.

Source: specification 2025-11-25 basic/transports (Resumability and Redelivery). Servers leave gaps between the events
that they replay and the events that they then send live. A resumed stream that stays silent is therefore opened again
from the same place, and the events that were handed over already are recognised by their ids.

Rule: no I/O and no clock here. The caller reports what happened and sleeps as long as the answer says.
"""

from dataclasses import dataclass
from typing import Final

RETRY_SECONDS: Final = (0.1, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0)
"""Pauses before a request is resumed again. The number of pauses is the number of failures in a row allowed."""
SILENCE_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""How long a resumed stream may be silent before it is opened again."""
MAX_EVENT_IDS: Final = 1024
"""Event ids that are remembered for one request, as hashes: 0.1 MiB at most, however long the server makes them."""
MAX_EVENT_ID_CHARACTERS: Final = 1024
_MAX_ASKED_SECONDS: Final = 60.0
"""The longest pause that the `retry` field of a server can request."""


def asked_seconds(retry_ms: int | None) -> float:
    """Return the pause that the `retry` field of an event stream asks for."""
    return min((retry_ms or 0) / 1000, _MAX_ASKED_SECONDS)


@dataclass(slots=True, eq=False)
class Resumption:
    """The place of one request in its event stream, with the failures to resume it."""

    cursor: str | None = None
    """The last event id: the place after everything that was handed over. None if the stream cannot be resumed."""
    place: str = ""
    """The event id that a GET names: the stream continues behind it."""
    _seen: set[int] | None = None
    """Hashes of the ids of the events that were handed over since `place`, if there are any."""
    _counts_local: bool = False
    _is_given_up: bool = False
    """Whether the answer is not wanted any more."""
    _failures: int = 0
    """GETs that the server failed in a row."""
    _pauses: int = 0
    """Pauses since the last new message."""
    _silences: int = 0
    """Streams that were silent or cut since the server accepted an answer."""

    def start(self, place: str, *, counts_local: bool = False) -> None:
        """The stream of the request broke: resume it behind this event id.

        `counts_local`: give up after faults of the gateway's own host, too, and not only of the server.
        """
        self.place = self.cursor = place
        self._counts_local = counts_local
        self._failures = self._pauses = self._silences = 0

    def is_repeated(self, event_id: str) -> bool:
        """Whether this event was handed over before; if not, the cursor moves on to it."""
        if not 0 < len(event_id) <= MAX_EVENT_ID_CHARACTERS or not event_id.isprintable():
            self.cursor = None  # the server withdrew it, or it does not fit into a header
            return False
        name = hash(event_id)
        seen = self._seen
        if seen is None:
            seen = self._seen = set()
        if name in seen:
            return True
        if len(seen) >= MAX_EVENT_IDS:
            seen.clear()
            self.place = event_id
        seen.add(name)
        self.cursor = event_id
        return False

    def give_up(self) -> None:
        """The request was cancelled. Its server need not answer, so its stream is not opened for ever."""
        self._is_given_up = True

    # -- what happened to the streams ---------------------------------------------------------------------------

    def connected(self) -> None:
        """The server answered a GET with a stream."""
        self._failures = 0

    def heard(self) -> None:
        """The stream brought a new message."""
        self._pauses = 0

    def answered(self) -> None:
        """The server accepted an answer: the result may follow at once, perhaps on a different stream."""
        self._silences = 0

    def silent(self) -> None:
        """A stream was silent for `silence_seconds`: it is opened again without a pause."""
        self._silences += 1

    def cut(self, retry_ms: int | None) -> float | None:
        """A stream ended without the result; return the pause before the next GET, or None to give up."""
        self._silences += 1
        # A call that is still wanted may run for as long as it takes.
        is_enough = self._is_given_up and self._pauses >= len(RETRY_SECONDS)
        return None if is_enough else self._pause(asked_seconds(retry_ms))

    def failed(self, *, is_local: bool = False) -> float | None:
        """A GET failed in a way that may pass; return the pause before the next one, or None to give up.

        A failure with its cause on this host (`is_local`) does not show that the server is gone.
        """
        self._failures += not is_local or self._counts_local or self._is_given_up
        return None if self._failures > len(RETRY_SECONDS) else self._pause(0.0)

    @property
    def silence_seconds(self) -> float:
        """How long the stream may be silent: longer after each silent stream, short again after an answer."""
        return SILENCE_SECONDS[min(self._silences, len(SILENCE_SECONDS) - 1)]

    def _pause(self, at_least: float) -> float:
        seconds = RETRY_SECONDS[min(self._pauses, len(RETRY_SECONDS) - 1)]
        self._pauses += 1
        return max(at_least, seconds)
