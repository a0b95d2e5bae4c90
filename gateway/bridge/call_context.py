"""What the parts of one call need to know about it."""

import msgspec
from msgspec import Raw

from gateway.exchange.machine import Exchange
from gateway.protocol.request import Request
from gateway.routes.live_route import LiveRoute
from gateway.sessions.call import PoolKey
from gateway.sessions.list_cache import CacheKey
from gateway.sessions.session import Session
from gateway.telemetry import Span
from gateway.upstream.channel import Headers


class ClientCall(msgspec.Struct, eq=False):
    """A call as a client's request makes it."""

    live: LiveRoute
    """The route as it was when the request came; a reload does not change it."""
    request: Request
    key: PoolKey
    headers: Headers
    """The headers that go upstream."""
    address: str = ""
    """The address of the client, if a limit depends on it."""
    ticket: CacheKey | None = None
    """Where the result may be kept, if it is a list."""


class Context(ClientCall, eq=False, kw_only=True):
    """One exchange: the call of its first leg, with the headers of its newest. Only the driver feeds the exchange."""

    exchange: Exchange
    request_id: str | None = None
    """The id of the newest leg's HTTP request, for the log."""
    span: Span | None = None
    """The span of the newest leg, if it is traced."""
    is_repeatable: bool = False
    """Whether the replica that sent the call knew from the server that its tool may run twice."""
    server_info: Raw | None = None
    """Known as soon as there was a session."""
    is_state_whole: bool = False
    """Whether the newest requestState has everything that continues the call."""

    def runs_in(self, session: Session) -> None:
        """The call runs in this session, whose pool key is an equal one."""
        self.key = session.group.key
        self.server_info = session.shaken.server_info
