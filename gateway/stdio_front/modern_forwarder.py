"""Passes the requests of a modern host to a modern server unchanged.

Over HTTP, a server wants the annotated arguments of a tool repeated in headers, which only the tool's schema names. So
the first call of a tool that was not listed lists the tools.
"""

from typing import Final

from msgspec import Raw

from gateway.mirror.client_profile import Profile
from gateway.mirror.modern_server import ModernServer, Outgoing
from gateway.mirror.tool_catalog import ToolCatalog
from gateway.protocol import jsonrpc, mcp, param_headers
from gateway.protocol.request import ParsedBody
from gateway.runtime.call_bytes import CallBytes
from gateway.stdio_front.host import HOST, Host
from gateway.upstream.channel import Headers

_CALLER: Final = ("", b"")
"""There is one host and one server."""


class Forwarder:
    """The way from one host to one modern server."""

    def __init__(self, host: Host, server: ModernServer, headers: Headers, calls: CallBytes) -> None:
        """`headers` are the route's own."""
        self._host = host
        self._calls = calls
        self._server = server
        self._headers = headers
        self._catalog = ToolCatalog()

    async def serve(self, parsed: ParsedBody, line: bytes) -> None:
        """Pass a request on with everything that answers it; if cancelled, cancel it at the server.

        Raises GatewayError.
        """
        with self._calls.take(HOST, 2 * len(line)):
            await self._serve(parsed, line)

    async def _serve(self, parsed: ParsedBody, line: bytes) -> None:
        assert parsed.id is not None
        target = jsonrpc.text(parsed.params.get(mcp.TARGET_FIELD.get(parsed.method, ""))) or ""
        repeated = await self._repeated(parsed, target) if self._server.reads_headers else {}
        is_mismatch = False

        def hear(data: bytes) -> None:
            nonlocal is_mismatch
            error = jsonrpc.message(data).error
            is_mismatch = isinstance(error, Raw) and jsonrpc.error(error).code == mcp.HEADER_MISMATCH
            self._host.send(data)

        is_long = parsed.method == mcp.LISTEN
        request = Outgoing(bytes(parsed.id), line, parsed.method, target, self._headers, repeated, is_long=is_long)
        await self._server.send(request, hear)
        if is_mismatch:
            self._catalog.forget(_CALLER)  # the tool has changed; the host's next call lists the tools again

    async def _repeated(self, parsed: ParsedBody, tool: str) -> dict[str, str]:
        if parsed.method != mcp.TOOLS_CALL:
            return {}
        if not self._catalog.knows(_CALLER, tool):
            await self._catalog.read(_CALLER, self._server, _profile(parsed), self._headers)
        mirrored = self._catalog.find(_CALLER, tool).mirrored
        return param_headers.headers_for(mirrored, parsed.params.get("arguments")) if mirrored else {}


def _profile(parsed: ParsedBody) -> Profile:
    """Return what the host says of itself in every request."""
    meta = parsed.meta or {}
    info = bytes(meta.get(mcp.META_CLIENT_INFO, b'{"name":"host","version":"0"}'))
    return Profile(mcp.LEGACY, info, bytes(meta.get(mcp.META_CAPABILITIES, b"{}")))
