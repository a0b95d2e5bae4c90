"""What the sessions of one HTTP upstream share, such as the pauses or deadlines that no configuration sets."""

from typing import Final, NamedTuple

from msgspec import Struct

from gateway.http.upstream_client import Client
from gateway.http.upstream_url import Endpoint
from gateway.runtime.tasks import Tasks


class StreamTimes(Struct, frozen=True, kw_only=True):
    """The times of production by default; tests construct shorter ones."""

    drain_seconds: float = 1.0
    """How long a reply may take to end before its connection is closed, once it brought the answer or accepted a
    message."""
    side_head_seconds: float = 2.0
    """How long the handshake waits for the head of the standalone GET stream. Some servers delay it to an event."""
    reopen_seconds: tuple[float, ...] = (0.0, 0.5, 2.0, 5.0)
    """Pauses before the standalone GET stream is opened again."""
    retry_seconds: tuple[float, ...] = (0.1, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    """Pauses before a request is resumed again. The number of pauses is the number of failures in a row allowed."""
    resume_head_seconds: float = 5.0
    """How long a server may take to answer the GET that resumes a request."""
    silence_seconds: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)
    """How long a resumed stream may be silent before it is opened again."""
    endpoint_seconds: float = 4.0
    """How long a stream of HTTP+SSE may take to name its endpoint: less than half of timeouts.handshake_seconds."""
    probe_pause_seconds: float = 1.0
    """The shortest time between the starts of two probes for the upstream's era."""


DEFAULT_TIMES: Final = StreamTimes()


class HttpUpstream(NamedTuple):
    """One upstream, with the means to speak to it."""

    client: Client
    endpoint: Endpoint
    tasks: Tasks
    times: StreamTimes = DEFAULT_TIMES
