"""A client that follows SEP-1442 line by line; it sends each message to another replica."""

import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from tests.support.legacy_client import Json, Stream

VERSION: Final = "modelcontextprotocol.io/mcpProtocolVersion"
CAPABILITIES: Final = "modelcontextprotocol.io/clientCapabilities"
ALL: Final[Json] = {"elicitation": {}, "sampling": {}, "roots": {}}


class PaperClient:
    """One client."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        urls: list[str],
        *,
        version: str = "2025-06-18",
        capabilities: Json | None = ALL,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._http = http
        self._urls = itertools.cycle(urls)
        self.version = version
        self.capabilities = capabilities
        self.headers = dict(headers or {})
        self.session: str | None = None
        self._ids = itertools.count(1)

    @asynccontextmanager
    async def post(self, message: Json, **headers: str | None) -> AsyncIterator[Stream]:
        """Send one message; a header of None is left out."""
        sent: dict[str, str | None] = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "MCP-Protocol-Version": self.version,
            "MCP-Session-Id": self.session,
            **self.headers,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        given = {name: value for name, value in sent.items() if value is not None}
        body = json.dumps({"jsonrpc": "2.0", **message})
        async with self._http.post(next(self._urls), headers=given, data=body) as response:
            yield Stream(response)

    def meta(self, **more: Any) -> Json:
        """The `_meta` of a request; a value of None is left out."""
        meta = {VERSION: self.version, CAPABILITIES: self.capabilities, **more}
        return {key: value for key, value in meta.items() if value is not None}

    @asynccontextmanager
    async def request(
        self, method: str, params: Json | None = None, meta: Json | None = None, id_: Any = None, **headers: str | None
    ) -> AsyncIterator[Stream]:
        params = {**(params or {}), "_meta": self.meta(**(meta or {}))}
        id_ = next(self._ids) if id_ is None else id_
        async with self.post({"id": id_, "method": method, "params": params}, **headers) as stream:
            yield stream

    @asynccontextmanager
    async def call(
        self, name: str, meta: Json | None = None, id_: Any = None, arguments: Json | None = None
    ) -> AsyncIterator[Stream]:
        async with self.request("tools/call", {"name": name, "arguments": arguments or {}}, meta, id_) as stream:
            yield stream

    async def ask(
        self, method: str, params: Json | None = None, meta: Json | None = None, **headers: str | None
    ) -> tuple[int, Json]:
        """Send a request; return the status and the first message of its reply."""
        async with self.request(method, params, meta, **headers) as stream:
            return stream.response.status, await stream.message()

    async def initialize(self) -> Json:
        params = {
            "protocolVersion": self.version,
            "capabilities": self.capabilities or {},
            "clientInfo": {"name": "paper", "version": "7"},
        }
        _, message = await self.ask("initialize", params)
        result: Json = message["result"]
        self.session = result["sessionId"]
        return result

    async def answer(self, question: Json, result: Any) -> int:
        """Answer a question; return the status."""
        async with self.post({"id": question["id"], "result": result}) as stream:
            return stream.response.status

    async def refuse(self, question: Json) -> int:
        """Answer a question that this client cannot put to anybody."""
        error = {"code": -32601, "message": "Method not found"}
        async with self.post({"id": question["id"], "error": error}) as stream:
            return stream.response.status

    async def notify(self, method: str, params: Json | None = None) -> int:
        params = {**(params or {}), "_meta": {VERSION: self.version}}
        async with self.post({"method": method, "params": params}) as stream:
            return stream.response.status
