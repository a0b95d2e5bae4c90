"""What the mirror knows of the tools of modern servers.

These are the arguments that headers repeat, and whether a tool may run twice.

A modern server refuses a call whose `Mcp-Param-*` headers do not repeat its annotated arguments, and only the tool's
schema tells which these are. So the first call of a tool that no list has named lists the tools.
"""

from collections import OrderedDict
from typing import Final

from msgspec import Raw

from gateway.mirror.modern_server import ModernServer, Outgoing, ask
from gateway.mirror.profile import Profile
from gateway.mirror.translation import modern_request
from gateway.protocol import jsonrpc, mcp, param_headers
from gateway.protocol.errors import GatewayError
from gateway.protocol.param_headers import Tool
from gateway.upstream.channel import Headers

_MAX_PAGES: Final = 50
_MAX_CALLERS: Final = 1_000
_UNKNOWN: Final = Tool()

CallerKey = tuple[str, bytes]
"""The path of a route with a principal: servers may show each caller other tools."""


class ToolCatalog:
    """The tools by caller; what was used longest ago is forgotten first."""

    def __init__(self) -> None:
        self._callers: OrderedDict[CallerKey, dict[str, Tool]] = OrderedDict()

    def knows(self, caller: CallerKey, tool: str) -> bool:
        """Whether a list named the tool."""
        return tool in self._callers.get(caller, ())

    def find(self, caller: CallerKey, tool: str) -> Tool:
        """What is known of a tool."""
        return self._callers.get(caller, {}).get(tool, _UNKNOWN)

    def learn(self, caller: CallerKey, result: Raw | bytes) -> None:
        """Take over a page of a tools/list result, whichever it is."""
        try:
            found = param_headers.of_tools(bytes(result))
        except ValueError:
            return
        self._callers.setdefault(caller, {}).update(found)
        self._callers.move_to_end(caller)
        if len(self._callers) > _MAX_CALLERS:
            _ = self._callers.popitem(last=False)

    async def read(self, caller: CallerKey, server: ModernServer, profile: Profile, headers: Headers) -> None:
        """List the tools; a server that does not list them repeats no argument."""
        params: dict[str, Raw] = {}
        for _ in range(_MAX_PAGES):
            body = modern_request(b'"tools"', mcp.TOOLS_LIST, params, profile)
            try:
                page = await ask(server, Outgoing(body, mcp.TOOLS_LIST, "", headers))
                cursor = None if isinstance(page, jsonrpc.Error) else jsonrpc.fields(page).get("nextCursor")
            except (GatewayError, ValueError):
                return
            if isinstance(page, Raw):
                self.learn(caller, page)
            if cursor is None or jsonrpc.is_null(cursor):
                return
            params = {"cursor": cursor}

    def forget(self, caller: CallerKey) -> None:
        """Forget the tools of a caller, because the server says that their headers have changed."""
        self._callers.pop(caller, None)
