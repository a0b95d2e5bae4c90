"""The sessions of one pool key with what the gateway learnt in them.

What is learnt: the server's handshake, its tools, the credentials that it accepted.
"""

import asyncio  # noqa: TC003  (one import style; it costs nothing here)
import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Generic

from gateway import world
from gateway.exchange.handshake import Handshake
from gateway.protocol import mcp
from gateway.runtime.coarse_timer import Alarm
from gateway.sessions.accepted_credentials import AcceptedCredentials
from gateway.sessions.affinity import S
from gateway.sessions.call import PoolKey, Watcher
from gateway.sessions.known_tools import KnownTools
from gateway.telemetry import SessionState

MAX_FOLLOWED: Final = 100
"""The most resources of a caller's subscriptions to which a process is subscribed before a call."""


@dataclass(slots=True, eq=False)
class SessionRequest(Generic[S]):
    """A caller that needs a session; compared by identity."""

    group: "Group[S]"
    outcome: "asyncio.Future[S]"
    """Or the error for a session that may not be opened now."""
    is_fresh: bool = False
    """No used session will do."""
    is_exempt: bool = True
    """It is never refused, because it continues a call, or comes from the gateway itself."""


class ChangeListeners:
    """The listeners of one pool that want to know of changes on any session of their principal."""

    def __init__(self) -> None:
        self._listeners: dict[bytes, dict[Watcher, Collection[str]]] = {}

    def uris(self, principal: bytes) -> Collection[str]:
        """The resources that the listeners of a principal subscribed to, or as many of them as a session takes."""
        chosen = itertools.chain.from_iterable(self._listeners.get(principal, {}).values())
        # Keys compare like a set, and have the same order in every process (decision 59).
        return dict.fromkeys(itertools.islice(dict.fromkeys(chosen), MAX_FOLLOWED)).keys()

    def of(self, principal: bytes) -> Collection[Watcher]:
        """The listeners of a principal."""
        return self._listeners.get(principal, {})

    @contextmanager
    def listening(self, principal: bytes, listener: Watcher, uris: Collection[str] = ()) -> Iterator[None]:
        """Keep a listener, which subscribed to these resources, for as long as the context is open."""
        listeners = self._listeners.setdefault(principal, {})
        listeners[listener] = uris
        try:
            yield
        finally:
            del listeners[listener]
            if not listeners:
                _ = self._listeners.pop(principal, None)


@dataclass(slots=True, eq=False)
class Group(Generic[S]):
    """The sessions of one pool key, with the requests for such sessions."""

    key: PoolKey
    is_affine: bool
    """Whether all calls go to one session, but requests for a fresh one (`sessions.affinity: principal`)."""
    _all_listeners: ChangeListeners
    """Those of the pool."""
    _sweeper: Alarm
    """That of the pool, which closes sessions that are of no use any more."""
    main: S | None = None
    """With affinity: the session of all calls, from before its handshake until it is dropped."""
    sessions: dict[S, SessionState] = field(default_factory=dict)
    """All sessions, the oldest first, joiners apart."""
    idle: dict[S, float] = field(default_factory=dict)
    """Since when (monotonic), the first one for longest."""
    waiting: dict[SessionRequest[S], None] = field(default_factory=dict)
    """All requests, in the order of their arrival."""
    takers: dict[SessionRequest[S], None] = field(default_factory=dict)
    """The requests among them that a used session satisfies."""
    shaken: Handshake | None = None
    tools: KnownTools = field(default_factory=KnownTools)
    credentials: AcceptedCredentials = field(default_factory=AcceptedCredentials)
    used: float = 0.0
    """When its pool was last asked for it (monotonic)."""

    def add(self, session: S, *, is_fresh: bool) -> None:
        """A session is in its handshake from now on; with affinity it is that of all calls, unless it `is_fresh`."""
        if self.is_affine and not is_fresh:
            self.main = session
        self.sessions[session] = SessionState.BUSY

    def drop(self, session: S) -> None:
        """A session is not kept any more."""
        del self.sessions[session]
        if self.main is session:
            self.main = None

    @property
    def is_empty(self) -> bool:
        """Whether the group has no session and no waiting request."""
        return not (self.sessions or self.waiting)

    @property
    def knows_nothing(self) -> bool:
        """Whether the group is empty, and the upstream has never served it."""
        return self.is_empty and not (self.shaken or self.credentials or self.tools)

    @property
    def listeners(self) -> Collection[Watcher]:
        """Those that want to know of changes on any session of the principal."""
        return self._all_listeners.of(self.key.principal)

    # -- the watcher of its sessions --------------------------------------------------------------------------------

    def changed(self, method: str, data: bytes) -> None:  # noqa: ARG002  (a Watcher)
        """Forget what an announced change made wrong."""
        if method == mcp.TOOLS_CHANGED:
            self.tools.changed()

    def missed(self) -> None:
        """Forget what a lost announcement may have made wrong."""
        self.tools.may_have_changed()

    def deaf(self, *, heard: bool) -> None:
        """Forget everything if the stream once worked: the server was restarted, and may be a different one now."""
        self._sweeper.set(world.monotonic())  # an idle session that is lost now is closed within a second
        if heard:
            self.missed()
