"""What the mirror knows of the tools of modern servers.

These are the arguments that headers repeat, and whether a tool may run twice.

A modern server refuses a call whose `Mcp-Param-*` headers do not repeat its annotated arguments, and only the tool's
schema tells which these are. So the first call of a tool lists the tools, unless the client has done so.
"""

import asyncio
from contextlib import suppress
from typing import Final

from msgspec import Raw

from gateway.mirror.client_requests import Profile
from gateway.mirror.server_client import ANSWER_SECONDS, ModernRequest, ServerClient, ask
from gateway.protocol import jsonrpc, mcp, tool_list
from gateway.protocol.errors import GatewayError
from gateway.protocol.tool_list import Tool
from gateway.runtime.newest import Newest
from gateway.sessions.pool.tool_schemas import only_page, read_pages
from gateway.upstream.channel import Headers

_MAX_CALLERS: Final = 1_000
_MAX_TOOLS: Final = 100_000
"""Of all callers together."""
_MAX_NAME: Final = 256
UNKNOWN_TOOL: Final = Tool()

CallerKey = tuple[str, bytes]
"""The path of a route with a principal: servers may show each caller other tools."""


class ToolCatalog:
    """The tools by caller, as whole lists name them; what was used longest ago is forgotten first."""

    def __init__(self) -> None:
        self._callers: Newest[CallerKey, dict[str, Tool]] = Newest(_MAX_CALLERS)
        self._count = 0
        """Of all tools."""
        self._reading: dict[CallerKey, asyncio.Future[None]] = {}

    async def tool(
        self, caller: CallerKey, server: ServerClient, profile: Profile, headers: Headers, name: str
    ) -> Tool:
        """What is known of a tool, once they were listed; a server that lists none repeats no argument."""
        if caller not in self._callers:
            await self._read(caller, server, profile, headers)
        if (tools := self._callers.get(caller)) is None:
            return UNKNOWN_TOOL
        self._callers.move_to_end(caller)
        return tools.get(name, UNKNOWN_TOOL)

    def learn(self, caller: CallerKey, params: jsonrpc.Fields, result: Raw) -> None:
        """Take over a tools/list that was complete in one page; `tool` reads the longer ones."""
        with suppress(ValueError):
            if (tools := only_page(params, tool_list.read(result))) is not None:
                self._keep(caller, tools)

    def _keep(self, caller: CallerKey, tools: dict[str, Tool]) -> None:
        self.forget(caller)
        kept = {name: tool for name, tool in tools.items() if len(name) <= _MAX_NAME}
        self._count += len(kept) - len(self._callers.keep(caller, kept) or ())
        while self._count > _MAX_TOOLS:
            self.forget(next(iter(self._callers)))

    async def _read(self, caller: CallerKey, server: ServerClient, profile: Profile, headers: Headers) -> None:
        """List the tools. Calls that need the list at the same time share it.

        If it comes too late, the server refuses a call whose headers are missing, without running it.
        """
        if (reading := self._reading.get(caller)) is not None:
            _ = await asyncio.wait((reading,))
            return
        tools: dict[str, Tool] = {}

        async def page(params: dict[str, object]) -> Raw | jsonrpc.Error:
            fields = jsonrpc.fields(jsonrpc.encode(params))
            return await ask(server, ModernRequest.new(mcp.TOOLS_LIST, fields, profile, headers))

        reading = self._reading[caller] = asyncio.get_running_loop().create_future()
        try:
            with suppress(GatewayError, ValueError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    _ = await read_pages(page, lambda result: tools.update(tool_list.read(result).tools or {}))
                self._keep(caller, tools)
        finally:
            del self._reading[caller]
            reading.set_result(None)

    def forget(self, caller: CallerKey) -> None:
        """Forget the tools of a caller, because the server says that their headers have changed."""
        self._count -= len(self._callers.pop(caller, ()))
