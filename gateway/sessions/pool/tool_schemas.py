"""What the gateway knows of an upstream's tools from tools/list.

It needs to know which tools may run twice, which arguments they repeat in `Mcp-Param-*` headers, and which tools must
be hidden because one invalid schema costs a client the whole list.

A server that processes the body must refuse a call whose headers differ from it (basic/transports/streamable-http,
Server Validation), so the first tools/call of a group lists the tools once if the client has not.
"""

from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Final

from msgspec import Raw

from gateway.protocol import jsonrpc, mcp, param_headers, tool_list
from gateway.protocol.errors import HeaderMismatch, SessionLost
from gateway.protocol.header_mismatch import HeaderValues
from gateway.protocol.request import Params, Request
from gateway.protocol.tool_list import OmittedTool, Tool, ToolList
from gateway.runtime.newest import Newest
from gateway.sessions.call import PoolKey
from gateway.sessions.known_tools import UNKNOWN_TOOL
from gateway.sessions.pool.authorisation import authorise
from gateway.sessions.pool.pool import Pool
from gateway.upstream.channel import Headers

_MAX_PAGES = 50
_PAGE_BYTES: Final = 262_144
"""A larger page is read each time, so that what is kept of pages is bounded."""
_read: Final[Newest[bytes, tuple[dict[str, Tool], tuple[OmittedTool, ...]]]] = Newest(32)
"""What the newest pages of lists say, by their digests: a server shows nearly all callers the same tools."""


def only_page(params: Params, listed: ToolList) -> dict[str, Tool] | None:
    """The tools of a tools/list that was complete in one page; None if it was not, or if it is malformed."""
    return listed.tools if listed.is_last and params.get("cursor") is None else None


async def check(pool: Pool, key: PoolKey, request: Request, http: HeaderValues | None, headers: Headers) -> Tool:
    """Refuse a tools/call whose `Mcp-Param-*` headers, if it has headers, differ from its arguments.

    Raises HeaderMismatch.

    The refusal names an argument of the tool, so the upstream sees the credential first; raises Refused. Returns what
    was then known of the tool: a change that may have been missed meanwhile makes the group forget it.
    """
    tool = pool.group(key).tools.find(request.target, headers)
    if tool is None:
        try:
            tool = await _know(pool, key, headers, request.target)
        except SessionLost:
            pool.forget_idle(key)
            tool = await _know(pool, key, headers, request.target)
    try:
        if http is not None:
            param_headers.check(tool.mirrored, request.params.get("arguments"), http)
    except HeaderMismatch:
        await authorise(pool, key, headers, is_exempt=False)
        raise
    return tool


async def _know(pool: Pool, key: PoolKey, headers: Headers, name: str) -> Tool:
    """List the tools of a group unless this one is known by then; a server without tools/list repeats no argument."""
    group = pool.group(key)
    session = await pool.acquire(key, headers, is_exempt=False)
    clean, is_whole, found = False, True, dict[str, Tool]()
    try:
        if group.tools.find(name, headers) is None:  # another call may have listed them meanwhile
            if session.shaken.offers("tools"):
                is_whole = await read_pages(
                    lambda params: session.ask(mcp.TOOLS_LIST, params, headers),
                    lambda page: found.update(_tools(pool, page)),
                )
            # Also of a list that breaks off, or each call of a tool on its first pages would list again.
            group.tools.learn(found, headers, is_whole=is_whole)
        clean = True
        return group.tools.find(name, headers) or UNKNOWN_TOOL
    finally:
        pool.release(session, clean=clean)


def _tools(pool: Pool, page: Raw) -> dict[str, Tool]:
    """The tools of a page without those that clients would reject; raises ValueError if it is not an object."""
    digest = blake2b(page).digest()
    known = _read.get(digest)
    if known is None:
        listed = tool_list.read(page)
        known = listed.tools or {}, listed.left_out
        if len(bytes(page)) <= _PAGE_BYTES:
            _ = _read.keep(digest, known)
    pool.leave_out(known[1])
    return known[0]


async def read_pages(
    ask: Callable[[dict[str, object]], Awaitable[Raw | jsonrpc.Error | None]], take: Callable[[Raw], None]
) -> bool:
    """Ask for the pages of a list in turn, and hand each to `take`, which raises ValueError for a malformed page.

    Returns whether every page could be read.
    """
    params: dict[str, object] = {}
    for _ in range(_MAX_PAGES):
        page = await ask(params)
        if not isinstance(page, Raw):
            return False
        try:
            take(page)
            cursor = jsonrpc.text(jsonrpc.fields(page).get("nextCursor"))
        except ValueError:
            return False
        if cursor is None:
            break
        params = {"cursor": cursor}
    return True
