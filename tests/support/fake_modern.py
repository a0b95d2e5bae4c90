"""A FAKE modern server over streamable HTTP, whose tools are functions of a test.

    server = FakeModern()
    server.tools["ask"] = lambda call: call.ask(name=FORM) if not call.answers else call.text(call.answers)

It keeps nothing between requests, and writes down each that it got.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from gateway.protocol import mcp
from tests.support.served import Served

Json = dict[str, Any]
FORM: Json = {
    "method": "elicitation/create",
    "params": {"mode": "form", "message": "Who?", "requestedSchema": {"type": "object", "properties": {}}},
}
PAGE: Json = {"method": "elicitation/create", "params": {"mode": "url", "message": "Go", "url": "https://example.com"}}
SAMPLE: Json = {
    "method": "sampling/createMessage",
    "params": {"messages": [{"role": "user", "content": {"type": "text", "text": "p"}}], "maxTokens": 9},
}
INFO: Json = {mcp.META_SERVER_INFO: {"name": "fake-modern", "version": "1"}}


class Call:
    """One request to a tool."""

    def __init__(self, body: Json, headers: Any, stream: "_Stream") -> None:
        self.body, self.headers = body, headers
        self.send, self.write, self.abort = stream.send, stream.write, stream.abort
        self.params: Json = body["params"]
        self.answers: Json = self.params.get("inputResponses") or {}
        self.state: str | None = self.params.get("requestState")
        self.meta: Json = self.params["_meta"]

    async def notify(self, method: str, params: Json) -> None:
        await self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def ask(self, state: str | None = "state", **requests: Json) -> Json:
        result: Json = {"resultType": "input_required", "inputRequests": requests}
        return {"result": result if state is None else {**result, "requestState": state}}

    def text(self, value: Any) -> Json:
        content = [{"type": "text", "text": json.dumps(value)}]
        return {"result": {"resultType": "complete", "_meta": INFO, "content": content}}

    def error(self, code: int, message: str = "no", data: Any = None) -> Json:
        return {"error": {"code": code, "message": message, **({} if data is None else {"data": data})}}


Tool = Callable[[Call], Json | Awaitable[Json]]


class FakeModern(Served):
    """One server; `requests` has what it got, the oldest first."""

    def __init__(self) -> None:
        self.tools: dict[str, Tool] = {}
        self.other: dict[str, Callable[[Call], Json]] = {}
        """What it answers to other methods."""
        self.listed: list[Json] = []
        self.requests: list[Json] = []
        self.headers: list[Any] = []
        self.peers: list[Any] = []
        """The connection that each request came on."""
        self.listeners: list[Callable[[Json], Awaitable[None]]] = []
        self.may_listen = asyncio.Event()
        """Cleared to have it acknowledge no subscription for a while."""
        self.may_listen.set()
        self.silent_about: set[str] = set()
        """Resources of whose changes it does not tell."""
        self.capabilities: Json = {"tools": {"listChanged": True}, "logging": {}, "resources": {"subscribe": True}}
        self.legacy: web.Response | None = None
        """Its answer to `initialize`."""
        self.credential: str | None = None
        """The only `Authorization` that it accepts."""
        self.challenge = 'Bearer realm="fake"'
        self.moved = ""
        """The path to which it redirects every other one, by a reply that never ends."""
        self.left = 0
        """Requests whose client went away."""

    def of(self, method: str) -> list[Json]:
        return [body for body in self.requests if body["method"] == method]

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        if http.method != "POST":
            return web.Response(status=405)
        body = json.loads(await http.read())
        if self.moved and http.path != self.moved:
            there = web.StreamResponse(status=307, headers={"Location": self.moved, "Content-Length": "10"})
            _ = await there.prepare(http)
            _ = await asyncio.Event().wait()
            return there
        if self.credential is not None and http.headers.get("Authorization") != self.credential:
            return web.Response(status=401, headers={"WWW-Authenticate": self.challenge})
        if http.headers.get(mcp.PROTOCOL_VERSION) != mcp.MODERN:
            refused = {"code": -32022, "message": "no", "data": {"supported": [mcp.MODERN], "requested": "?"}}
            return web.json_response({"jsonrpc": "2.0", "id": body.get("id"), "error": refused}, status=400)
        self.requests.append(body)
        self.headers.append(http.headers)
        self.peers.append(http.transport and http.transport.get_extra_info("peername"))
        stream = _Stream(http)
        try:
            final = await self.answer(Call(body, http.headers, stream), stream)
        except asyncio.CancelledError:
            self.left += 1
            raise
        message = {"jsonrpc": "2.0", "id": body["id"], **final}
        return await stream.end(message)

    async def answer(self, call: Call, stream: "_Stream") -> Json:
        match call.body["method"]:
            case mcp.DISCOVER:
                complete = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", "_meta": INFO}
                return {"result": {**complete, "supportedVersions": [mcp.MODERN], "capabilities": self.capabilities}}
            case mcp.TOOLS_LIST:
                tools = [{"name": name, "inputSchema": {"type": "object"}} for name in self.tools]
                named = {tool["name"] for tool in self.listed}
                tools = self.listed + [tool for tool in tools if tool["name"] not in named]
                return {"result": {"resultType": "complete", "ttlMs": 5, "cacheScope": "private", "tools": tools}}
            case mcp.LISTEN:
                return await self._listen(call, stream)
            case mcp.TOOLS_CALL:
                given = self.tools[call.params["name"]](call)
            case method:
                given = self.other[method](call) if method in self.other else call.error(-32601)
        return await given if isinstance(given, Awaitable) else given

    async def _listen(self, call: Call, stream: "_Stream") -> Json:
        await self.may_listen.wait()
        meta = {"_meta": {mcp.META_SUBSCRIPTION: call.body["id"]}}
        wanted = call.params["notifications"]
        uris = [uri for uri in wanted["resourceSubscriptions"] if uri not in self.silent_about]
        await call.notify(mcp.ACKNOWLEDGED, {**meta, "notifications": {**wanted, "resourceSubscriptions": uris}})

        async def tell(message: Json) -> None:
            await stream.send({**message, "params": {**message.get("params", {}), **meta}})

        self.listeners.append(tell)
        try:
            await asyncio.Event().wait()
        finally:
            self.listeners.remove(tell)
        raise AssertionError


class _Stream:
    def __init__(self, http: web.BaseRequest) -> None:
        self._http = http
        self._response: web.StreamResponse | None = None

    async def send(self, message: Json) -> None:
        await self.write(b"event: message\ndata: %b\n\n" % msgspec.json.encode(message))

    async def write(self, data: bytes) -> None:
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await self._response.prepare(self._http)
        await self._response.write(data)

    def abort(self) -> None:
        """Break the connection."""
        assert self._http.transport is not None
        self._http.transport.abort()

    async def end(self, message: Json) -> web.StreamResponse:
        if self._response is None:
            return web.json_response(message)
        await self.send(message)
        await self._response.write_eof()
        return self._response
