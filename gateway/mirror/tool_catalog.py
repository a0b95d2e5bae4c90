"""What the mirror knows of the tools of modern servers.

These are the arguments that headers repeat, and whether a tool may run twice.

A modern server refuses a call whose `Mcp-Param-*` headers do not repeat its annotated arguments, and only the tool's
schema tells which these are. So the first call of a tool lists the tools, unless the client has done so.
"""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec import Raw

from gateway.mirror.client_profile import Profile
from gateway.mirror.server_client import ANSWER_SECONDS, ModernRequest, ServerClient, ask
from gateway.mirror.translation import modern_request
from gateway.protocol import jsonrpc, mcp, param_headers
from gateway.protocol.errors import GatewayError
from gateway.protocol.param_headers import Tool
from gateway.runtime.newest import Newest
from gateway.runtime.own_ids import new_id
from gateway.sessions.pool.tool_schemas import read_pages
from gateway.upstream.channel import Headers

_MAX_CALLERS: Final = 1_000
_MAX_TOOLS: Final = 100_000
"""Of all callers together."""
_MAX_NAME: Final = 256
_UNKNOWN: Final = Tool()

CallerKey = tuple[str, bytes]
"""The path of a route with a principal: servers may show each caller other tools."""


class _Known:
    """The tools of one caller."""

    def __init__(self) -> None:
        self.tools: dict[str, Tool] = {}
        self.is_whole = False
        """Whether the list was read to its end: a tool that it does not name is not looked for again."""


class ToolCatalog:
    """The tools by caller; what was used longest ago is forgotten first."""

    def __init__(self) -> None:
        self._callers: Newest[CallerKey, _Known] = Newest(_MAX_CALLERS)
        self._count = 0
        """Of all tools."""
        self._reading: dict[CallerKey, asyncio.Future[None]] = {}

    def knows(self, caller: CallerKey, tool: str) -> bool:
        """Whether a list named the tool, or a whole list did not."""
        known = self._callers.get(caller)
        if known is None:
            return False
        self._callers.move_to_end(caller)
        return known.is_whole or tool in known.tools

    def find(self, caller: CallerKey, tool: str) -> Tool:
        """What is known of a tool."""
        known = self._callers.get(caller)
        return _UNKNOWN if known is None else known.tools.get(tool, _UNKNOWN)

    def learn(self, caller: CallerKey, result: Raw | bytes) -> None:
        """Take over a page of a tools/list result, whichever it is."""
        try:
            found = param_headers.of_tools(bytes(result))
        except ValueError:
            return
        tools = self._known(caller).tools
        before = len(tools)
        tools.update((name, tool) for name, tool in found.items() if len(name) <= _MAX_NAME)
        self._count += len(tools) - before
        while self._count > _MAX_TOOLS:
            self.forget(next(iter(self._callers)))

    def _known(self, caller: CallerKey) -> _Known:
        known = self._callers.get(caller) or _Known()
        oldest = self._callers.keep(caller, known)
        if oldest is not None:
            self._count -= len(oldest.tools)
        return known

    async def read(self, caller: CallerKey, server: ServerClient, profile: Profile, headers: Headers) -> None:
        """List the tools; a server that does not list them repeats no argument.

        Calls that need the list at the same time share it. What comes too late is missing: the server then refuses a
        call whose headers are missing, without running it.
        """
        reading = self._reading.get(caller)
        if reading is not None:
            _ = await asyncio.wait((reading,))
            return
        reading = self._reading[caller] = asyncio.get_running_loop().create_future()
        try:
            with suppress(GatewayError, ValueError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._read(caller, server, profile, headers)
        finally:
            del self._reading[caller]
            reading.set_result(None)

    async def _read(self, caller: CallerKey, server: ServerClient, profile: Profile, headers: Headers) -> None:
        async def page(params: dict[str, object]) -> Raw | jsonrpc.Error:
            id_ = new_id()
            body = modern_request(id_, mcp.TOOLS_LIST, jsonrpc.fields(jsonrpc.encode(params)), profile)
            return await ask(server, ModernRequest(id_, body, mcp.TOOLS_LIST, "", headers))

        _ = await read_pages(page, partial(self.learn, caller))
        self._known(caller).is_whole = True

    def forget(self, caller: CallerKey) -> None:
        """Forget the tools of a caller, because the server says that their headers have changed."""
        known = self._callers.pop(caller, None)
        if known is not None:
            self._count -= len(known.tools)
