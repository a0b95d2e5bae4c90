"""Translates the result of a legacy call into the modern one."""

from msgspec import Raw

from gateway.bridge.context import Context
from gateway.exchange import results
from gateway.protocol import mcp
from gateway.sessions import tool_schemas
from gateway.sessions.list_cache import CacheKey


def modern_result(
    context: Context, server_info: Raw, result: Raw, ticket: CacheKey | None
) -> tuple[bytes | Raw, bool]:
    """The modern result, and whether it says that the tool failed. Raises ValueError if it is not an object.

    The pool learns from it what later calls need: the tools of a list, and the list itself if `ticket` names a place
    in the cache.
    """
    request, pool = context.request, context.live.upstream.pool
    ttl_ms, scope = context.live.route.cache.of(request.method)
    if request.method == mcp.TOOLS_LIST:
        result = tool_schemas.usable(pool, result)
    is_retried = context.exchange.round > 0 or request.input_responses is not None
    body, is_tool_error = results.modern(request.method, result, server_info, ttl_ms, scope, retried=is_retried)
    if request.method == mcp.TOOLS_LIST:
        tool_schemas.learn(pool.group(context.key), request.params, result, context.headers)
    if ticket is not None:
        pool.keep(ticket, result, body)
    return body, is_tool_error
