"""Decides whether a lost call may be run again."""

import asyncio
from fnmatch import fnmatchcase
from typing import Final

from gateway.bridge.exchange_context import Context
from gateway.config import Route
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, GatewayError, SessionLost, Unreachable
from gateway.sessions.pool import tool_schemas

_NO_RESULT_WILL_COME: Final = (CallLost, SessionLost, Unreachable)
_LEARN_SECONDS: Final = 1.0
"""How long the client of a lost call waits at most while its tool is looked up."""


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


async def may_run_again(context: Context, error: GatewayError) -> bool:
    """Whether the call that this error ended may be run again. A call that never asked is left to its client."""
    exchange, request, pool = context.exchange, context.request, context.live.upstream.pool
    if not isinstance(error, _NO_RESULT_WILL_COME) or not (exchange.round and exchange.calling):
        return False
    is_unknown = not context.is_repeatable and not tool_schemas.is_listed(pool, context.key)
    if request.method == mcp.TOOLS_CALL and is_unknown:
        try:
            async with asyncio.timeout(_LEARN_SECONDS):
                await tool_schemas.know(pool, context.key, context.headers, request.target)
        except (GatewayError, TimeoutError):
            pass
    return may_run_twice(context)
