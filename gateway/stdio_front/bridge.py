"""Gives the requests of a modern host to the request handler of this process, as if they had come by HTTP.

What an HTTP client repeats in headers is made from the body. The caller is always the same: the host.
"""

import secrets
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.downstream.handler import RequestHandler
from gateway.http import request_id as ids
from gateway.http.incoming import Caller, Incoming
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.header_mismatch import encode_value
from gateway.protocol.request import ParsedBody
from gateway.routes.live_route import LiveRoute
from gateway.stdio_front.host import Host
from gateway.stdio_front.line_reply import LineReply

_HOST: Final = Caller(b"host", None)
"""The only caller there is."""


class Bridge:
    """The way from one host to the request handler."""

    def __init__(self, host: Host, handler: RequestHandler, live: LiveRoute) -> None:
        self._host = host
        self._handler = handler
        self._live = live
        self._ids = ids.numbered(secrets.token_hex(6))

    async def serve(self, parsed: ParsedBody, line: bytes) -> None:
        """Serve a request; if cancelled, its call is cancelled."""
        incoming = Incoming(
            self._live.route.path,
            _headers(parsed),
            None,
            body=line,
            request_id=next(self._ids),
            caller=_HOST,
            opened=parsed,
            has_headers=False,
        )
        reply = LineReply(self._host, self._live.config.limits.event_bytes, incoming.request_id)
        _ = await self._handler.handle_hop(incoming, reply)


def _headers(parsed: ParsedBody) -> CIMultiDictProxy[str]:
    """Return the headers with which a client sends this request by HTTP, but for those of tool parameters."""
    headers = CIMultiDict({mcp.METHOD_HEADER: parsed.method})
    version = jsonrpc.text((parsed.meta or {}).get(mcp.META_VERSION))
    if version is not None:
        headers[mcp.PROTOCOL_VERSION] = version
    target = jsonrpc.text(parsed.params.get(mcp.TARGET_FIELD.get(parsed.method, "")))
    if target is not None:
        headers[mcp.NAME_HEADER] = encode_value(target)
    return CIMultiDictProxy(headers)
