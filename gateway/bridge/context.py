"""What every part of one exchange needs to know about it."""

import msgspec

from gateway.exchange.machine import Exchange
from gateway.protocol.request import Request
from gateway.routes.live_route import LiveRoute
from gateway.sessions.call import PoolKey
from gateway.telemetry import Span
from gateway.upstream.channel import Headers


class Context(msgspec.Struct, eq=False):
    """One exchange, as its newest leg left it. Only the driver changes it, and only the driver feeds the exchange."""

    live: LiveRoute
    """The route as it was when the exchange began; a reload does not change it."""
    request: Request
    """The request of the first leg."""
    key: PoolKey
    exchange: Exchange
    headers: Headers
    """The upstream headers of the newest leg."""
    request_id: str | None = None
    """The id of the newest leg's HTTP request, for the log."""
    span: Span | None = None
    """The span of the newest leg, if it is traced."""
