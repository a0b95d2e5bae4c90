"""One upstream call as its session sees it.

Beside the call stand the key of the sessions that may serve it, its listener, and the watchers of its session.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from msgspec import Raw

from gateway import world
from gateway.exchange import events as on
from gateway.protocol import jsonrpc
from gateway.upstream.channel import NO_HEADERS, BegunReply, Headers

OF_NO_REQUEST: Final[Mapping[str, str | None]] = {"request_id": None}
"""What the log says of a message that no request of a client causes."""


class PoolKey(msgspec.Struct, frozen=True, cache_hash=True):
    """Everything that shapes a session besides its route; only equal keys share sessions."""

    principal: bytes
    client_info: bytes
    capabilities: bytes
    headers: tuple[tuple[str, str], ...]
    pin: str = ""
    """The client that has a session of its own, because it keeps state (SEP-1655); empty for all others."""


class Listener(Protocol):
    """Receives the events of one call."""

    @property
    def about(self) -> Mapping[str, str | None]:
        """The ids by which the log names what the call serves."""

    def hear(self, event: on.Event) -> None:
        """Take one event of the call."""


class Watcher(Protocol):
    """Receives the changes that a session announces."""

    def changed(self, method: str, data: bytes) -> None:
        """Take the method and the message of a list_changed or resources/updated notification."""

    def missed(self) -> None:
        """The side stream is open again after an interruption, in which changes may have been lost."""

    def deaf(self, *, heard: bool) -> None:
        """The side stream will not be opened again; `heard` says whether it ever was open. May be called twice."""


class Runner:
    """Runs a call: as its listener hears what the server says, its runner hears how the reply itself fares.

    This one stands for a coroutine that waits for the reply from the beginning, and sees for itself how it fares.
    """

    __slots__ = ()

    def broke(self, call: "Call") -> None:
        """The reply of a begun call is over without the answer: a task has to read it (`Session.read`)."""

    def attached(self) -> None:
        """The stream of a call that another process sent was found. May be called again."""


COROUTINE: Final = Runner()


class Call(msgspec.Struct, eq=False):
    """One upstream request with the listener of its events."""

    id: bytes
    """JSON."""
    message: bytes
    """Empty once the upstream has accepted it, so that it is not sent again."""
    listener: Listener
    progress_token: bytes = b""
    """JSON of the progress token in the upstream request; empty if the client wants no progress."""
    is_accepted: bool = False
    """Whether the upstream has accepted it, with its credential."""
    is_own: bool = False
    """Whether the gateway asks on its own account, so that no client could answer a question of the server."""
    sent: float = 0.0
    """Monotonic time of sending."""
    heard: float = 0.0
    """Monotonic time of the last message."""
    reading: asyncio.Task[object] | BegunReply | None = None
    """What reads the call's own stream: a task, or the reply itself as long as no task has to decide about it."""
    left: bool = False
    """Whether `leave` ended the reading."""
    headers: Headers = NO_HEADERS
    """The headers that the call was sent with."""
    runner: Runner = COROUTINE

    def starts(self, headers: Headers, runner: Runner = COROUTINE, reply: BegunReply | None = None) -> None:
        """It is in flight from now on."""
        self.headers, self.runner, self.reading = headers, runner, reply
        self.sent = self.heard = world.monotonic()

    def passes_to(self, listener: Listener, runner: Runner | None = None) -> None:
        """Another listener hears the call from now on, with another runner if one is given."""
        self.listener, self.runner = listener, runner or self.runner

    def stirs(self) -> None:
        """The upstream is not silent in it: it has said something, or could not before the client did."""
        self.heard = world.monotonic()

    @property
    def is_read_by_task(self) -> bool:
        """Whether a task notices that the reading has ended."""
        return isinstance(self.reading, asyncio.Task)

    def leave(self) -> None:
        """Stop reading: the answer came on the side stream, or the call was given up."""
        if self.left:
            return
        self.left = True  # `Session._read` tells by it why it is cancelled
        if isinstance(self.reading, asyncio.Task):
            _ = self.reading.cancel()
        elif self.reading is not None:
            self.reading.close()


@dataclass(eq=False)
class OwnListener:
    """The listener of a request that the gateway makes on its own account: it keeps the answer."""

    _beside: Listener | None = None
    """Hears everything else."""
    _ended: Callable[[Raw], None] | None = None
    """Called with a result, before anything else is heard."""
    outcome: Raw | jsonrpc.Error | None = None

    @property
    def about(self) -> Mapping[str, str | None]:
        """See `Listener`."""
        return OF_NO_REQUEST if self._beside is None else self._beside.about

    def hear(self, event: on.Event) -> None:
        """Keep the answer."""
        match event:
            case on.Resulted(result=result):
                self.outcome = found = Raw(result)
                if self._ended is not None:
                    self._ended(found)
            case on.Failed(error=error):
                self.outcome = error
            case _ if self._beside is not None:
                self._beside.hear(event)
            case _:
                pass
