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
from gateway.http.upstream_headers import credential_of
from gateway.protocol import mcp
from gateway.protocol.tool_list import Tool
from gateway.runtime.coarse_timer import Alarm
from gateway.runtime.newest import Newest
from gateway.sessions.affinity import S
from gateway.sessions.call import PoolKey, Watcher
from gateway.telemetry import SessionState
from gateway.upstream.channel import Headers

_ACCEPTED_SECONDS: Final = 60.0
"""How long a credential counts as checked for what the gateway answers itself."""
_CREDENTIALS_KEPT: Final = 64
UNKNOWN_TOOL: Final = Tool()
_TOOLS_KEPT: Final = 10_000
"""Bounds the tools of a server that renames them without announcing it."""
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
    tools: dict[str, Tool] | None = None
    """The tools by name, as complete answers to tools/list gave them (`learn`); None when unknown."""
    former: dict[str, Tool] | None = None
    """The tools as known before a change may have been missed; calls that began then are judged by these."""
    used: float = field(default_factory=world.monotonic)
    _accepted: Newest[tuple[str | None, str | None], float] = field(default_factory=lambda: Newest(_CREDENTIALS_KEPT))
    _newest: Headers | None = None
    """The headers that `accept` noted last, of the newest one of `_accepted`."""
    _credential: tuple[str | None, str | None] = None, None
    _listed: set[str | None] = field(default_factory=set)
    """Credentials with which the tools were listed since they last changed."""

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

    def learn(self, tools: dict[str, Tool], headers: Headers) -> None:
        """Take over a complete tools/list, which shows what this credential may see.

        Tools that another credential was shown stay known: a list of a narrower scope must not switch the header
        check of another tool off.
        """
        others = self._listed - {headers.get("Authorization")}
        known = self.tools if others and self.tools is not None else {}
        self.tools = {**known, **tools} if len(known) < _TOOLS_KEPT else tools
        self._listed = {*others, headers.get("Authorization")} if len(others) < _CREDENTIALS_KEPT else set()

    def tool(self, name: str, headers: Headers) -> Tool | None:
        """What is known of a tool, which need not be shown to this credential; None if the tools have to be listed."""
        if self.tools is None:
            return None
        found = self.tools.get(name)
        return UNKNOWN_TOOL if found is None and headers.get("Authorization") in self._listed else found

    def _forget_tools(self) -> None:
        self.tools = None
        self._listed.clear()

    @property
    def is_empty(self) -> bool:
        """Whether the group has no session and no waiting request."""
        return not (self.sessions or self.waiting)

    @property
    def knows_nothing(self) -> bool:
        """Whether the group is empty, and the upstream has never served it."""
        return self.is_empty and not (self.shaken or self._accepted or self.tools or self.former)

    def accept(self, headers: Headers) -> None:
        """Note that the upstream has just served a request with this credential."""
        if headers is not self._newest:
            self._newest, self._credential = headers, credential_of(headers)
            _ = self._accepted.keep(self._credential, 0.0)
        self._accepted[self._credential] = world.monotonic()

    def accepts(self, headers: Headers) -> bool:
        """Whether the upstream served this credential recently; forwarded credentials are part of the pool key."""
        accepted = self._accepted.get(credential_of(headers))
        return accepted is not None and world.monotonic() - accepted < _ACCEPTED_SECONDS

    @property
    def served(self) -> float:
        """Monotonic time at which the upstream last served a request; -inf before the first."""
        return next(reversed(self._accepted.values()), float("-inf"))

    @property
    def listeners(self) -> Collection[Watcher]:
        """Those that want to know of changes on any session of the principal."""
        return self._all_listeners.of(self.key.principal)

    # -- the watcher of its sessions --------------------------------------------------------------------------------

    def changed(self, method: str, data: bytes) -> None:  # noqa: ARG002  (a Watcher)
        """Forget what an announced change made wrong."""
        if method == mcp.TOOLS_CHANGED:
            self.former = None
            self._forget_tools()

    def missed(self) -> None:
        """Forget what a lost announcement may have made wrong."""
        self.former = self.tools or self.former
        self._forget_tools()

    def deaf(self, *, heard: bool) -> None:
        """Forget everything if the stream once worked: the server was restarted, and may be a different one now."""
        self._sweeper.set(world.monotonic())
        if heard:
            self.missed()
