"""The facts of one call that its parts share, with the rules whether it may run again."""

from fnmatch import fnmatchcase
from typing import Final

import msgspec

from gateway.config import Route
from gateway.exchange.machine import Exchange
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, GatewayError, SessionLost, Unreachable
from gateway.protocol.request import Request
from gateway.routes.live_route import LiveRoute
from gateway.runtime.call_bytes import Weight
from gateway.sessions.call import PoolKey
from gateway.sessions.pool import tool_schemas
from gateway.sessions.session import Session
from gateway.telemetry import Span
from gateway.upstream.channel import Headers

_NO_RESULT_WILL_COME: Final = (CallLost, SessionLost, Unreachable)


class ClientCall(msgspec.Struct, eq=False):
    """A call as a client's request makes it."""

    live: LiveRoute
    """The route as it was when the request came; a reload does not change it."""
    request: Request
    key: PoolKey
    headers: Headers
    """The headers that go upstream."""
    body_bytes: int = 0
    """The size of the client's request, of which `request` is a view; of its params, which a held call keeps."""

    def weigh(self, *, is_continued: bool = False) -> Weight:
        """Weigh the call: as it came, and as it goes upstream. Raises Busy, unless it `is_continued`."""
        return self.live.process.calls.take(self.key.principal, 2 * self.body_bytes, is_continued=is_continued)


class Context(ClientCall, eq=False, kw_only=True):
    """One exchange: the call of its first leg, with the headers of its newest. Only the driver feeds the exchange."""

    exchange: Exchange
    exchange_id: str = ""
    """Drawn when the exchange is first parked; most exchanges never are."""
    request_id: str | None = None
    """The id of the newest leg's HTTP request, for the log."""
    span: Span | None = None
    """The span of the newest leg, if it is traced."""
    is_repeatable: bool = False
    """Whether the server said of the tool that it may run twice: when the call was parked, to whoever held it then."""
    server_info: bytes | None = None
    """Known as soon as there was a session."""
    lacking_round: int = 0
    """The newest round with a requestState that lacks something of what continues the call."""
    is_state_resumable: bool = True
    """Whether another process can resume the call from that state, if this one has sealed any."""

    def runs_in(self, session: Session) -> None:
        """The call runs in this session, whose pool key is an equal one."""
        self.key = session.group.key
        self.server_info = session.shaken.server_info


def may_run_twice(context: Context) -> bool:
    """Whether the call is known to be repeatable: by its method, its route, or its tool's own annotation."""
    request = context.request
    return allows_rerun(context.live.route, request.method, request.target) or is_repeatable(context)


def allows_rerun(route: Route, method: str, target: str) -> bool:
    """Whether the method or the route says that a call may run twice."""
    if method != mcp.TOOLS_CALL or route.continuation == "replay":
        return True
    return any(fnmatchcase(target, pattern) for pattern in route.ephemeral)


def is_repeatable(context: Context) -> bool:
    """Whether the server says of the tool of this call that it may run twice, as far as is known."""
    request, pool = context.request, context.live.upstream.pool
    return context.is_repeatable or tool_schemas.is_ephemeral(pool, context.key, request.target)


def may_run_again(context: Context, error: GatewayError) -> bool:
    """Whether the call that this error ended may be run again. A call that never asked is left to its client."""
    exchange = context.exchange
    has_asked = bool(exchange.round) and exchange.calling
    return has_asked and isinstance(error, _NO_RESULT_WILL_COME) and may_run_twice(context)
