"""A modern host: its requests go to the request handler of this process, as if they had come by HTTP.

What an HTTP client repeats in headers is made from the body here. The caller is always the same: the host.
"""

import asyncio
import base64
import secrets
from typing import Final

import msgspec
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.downstream.handler import RequestHandler
from gateway.http import request_id as ids
from gateway.http.incoming import Caller, Incoming
from gateway.protocol import jsonrpc, mcp, request
from gateway.protocol.errors import DownstreamError, InvalidRequest
from gateway.protocol.request import ParsedBody
from gateway.routes.live_route import LiveRoute
from gateway.stdio_front.host import Host
from gateway.stdio_front.line_reply import LineReply
from gateway.telemetry import Direction, bodies

HOST: Final = Caller(b"host", None)
"""The only caller there is."""


class ModernHost:
    """The requests of one host that are in flight."""

    def __init__(self, host: Host, handler: RequestHandler, live: LiveRoute) -> None:
        self._host = host
        self._handler = handler
        self._live = live
        self._ids = ids.numbered(secrets.token_hex(6))
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._listening: set[bytes] = set()

    @property
    def calls(self) -> list[asyncio.Task[None]]:
        """The requests in flight, but for subscriptions, which end only with their host."""
        return [task for id_, task in self._running.items() if id_ not in self._listening]

    def receive(self, line: bytes) -> None:
        """Take one message of the host."""
        if bodies.on:
            bodies.show(Direction.FROM_CLIENT, line, route=self._live.route.path, request_id=None)
        try:
            parsed = request.read(line, self._live.config.limits.json_depth)
            if parsed.id is None:
                if parsed.method == mcp.CANCELLED:
                    self._cancel(parsed.params.get("requestId"))
                return
            if bytes(parsed.id) in self._running:
                raise InvalidRequest("A request with this id is in flight; give each request an id of its own")
        except DownstreamError as exc:
            if not _is_response(line):
                self._host.send(jsonrpc.failure(exc.request_id, jsonrpc.Error(exc.code, exc.message)))
            return
        self._begin(parsed, line)

    def _begin(self, parsed: ParsedBody, line: bytes) -> None:
        assert parsed.id is not None
        id_ = bytes(parsed.id)
        incoming = Incoming(
            self._live.route.path,
            _headers(parsed),
            None,
            body=line,
            has_headers=False,
            request_id=next(self._ids),
            caller=HOST,
            opened=parsed,
        )
        if parsed.method == mcp.LISTEN:
            self._listening.add(id_)
        task = self._running[id_] = self._live.process.tasks.start(self._serve(incoming), "request of the host")
        task.add_done_callback(lambda _: self._ended(id_))

    def _ended(self, id_: bytes) -> None:
        del self._running[id_]
        self._listening.discard(id_)

    async def _serve(self, incoming: Incoming) -> None:
        reply = LineReply(self._host, self._live.config.limits.event_bytes, incoming.request_id)
        try:
            _ = await self._handler.handle_hop(incoming, reply)
        except ConnectionError:
            pass  # the host is gone

    def _cancel(self, id_: Raw | None) -> None:
        """Stop a request; the host gets nothing more of it. An unknown one has been answered."""
        task = self._running.get(bytes(id_ or b""))
        if task is not None:
            _ = task.cancel()

    def close(self) -> None:
        """Cancel everything."""
        for task in self._running.values():
            _ = task.cancel()


def _headers(parsed: ParsedBody) -> CIMultiDictProxy[str]:
    """Return the headers with which a client sends this request by HTTP, but for those of tool parameters."""
    headers = CIMultiDict({mcp.METHOD_HEADER: parsed.method})
    version = jsonrpc.text((parsed.meta or {}).get(mcp.META_VERSION))
    if version is not None:
        headers[mcp.PROTOCOL_VERSION] = version
    target = jsonrpc.text(parsed.params.get(mcp.TARGET_FIELD.get(parsed.method, "")))
    if target is not None:
        headers[mcp.NAME_HEADER] = f"=?base64?{base64.b64encode(target.encode('utf-8', 'replace')).decode()}?="
    return CIMultiDictProxy(headers)


def _is_response(line: bytes) -> bool:
    """Whether a message answers a request, so that it gets no answer itself."""
    try:
        message = jsonrpc.message(line)
    except (ValueError, msgspec.MsgspecError):
        return False
    return message.method is None and (isinstance(message.result, Raw) or isinstance(message.error, Raw))
